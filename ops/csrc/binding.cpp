// The schemas of all operators, and the CPU kernels of the flat passes. One schema serves every device: the CUDA
// kernels are registered by binding_cuda.cpp. On a CPU torch runs the Newton-Schulz iteration.
//
// This is the only CPU source with torch/library.h, which costs seconds to compile.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "binding_checks.h"
#include "cpu/flat.h"

namespace {

using muon::cpu::Element;
using muon::FlatRow;

// Elements a thread must get before another one is worth waking.
constexpr int64_t kGrain = 1 << 15;

// Of one of the three types that the passes take.
Element element(at::ScalarType type) {
  return type == at::kFloat ? Element::fp32 : type == at::kBFloat16 ? Element::bf16 : Element::fp16;
}

muon::cpu::Array array(const at::Tensor& t, int64_t offset) {
  // The kernels write only to what the schemas mark as mutated.
  return {static_cast<char*>(const_cast<void*>(t.const_data_ptr())) + offset * t.element_size(), element(t.scalar_type())};
}

// Calls run(row, begin, end) for the elements of all fragments, divided over the threads whatever their sizes.
template <typename Run>
void for_fragments(at::ArrayRef<FlatRow> rows, const Run& run, int64_t grain = kGrain) {
  std::vector<int64_t> ends;
  int64_t total = 0;
  for (const FlatRow& row : rows) ends.push_back(total += row.numel);
  at::parallel_for(0, total, grain, [&](int64_t begin, int64_t end) {
    size_t number = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (; begin < end; ++number) {
      const int64_t start = ends[number] - rows[number].numel, stop = std::min(end, ends[number]);
      if (begin < stop) run(rows[number], begin - start, stop - start);
      begin = stop;
    }
  });
}

void momentum_pack(
    at::TensorList bufs, at::TensorList grads, at::TensorList outs, const at::Tensor& table, const at::Tensor& rates) {
  muon::check_momentum_pack(bufs, grads);
  const at::ArrayRef<FlatRow> rows = muon::flat_rows("momentum_pack_", table, bufs, outs);
  const double* const rate = muon::flat_rates("momentum_pack_", rates, rows);
  for_fragments(rows, [&](const FlatRow& row, int64_t begin, int64_t end) {
    muon::cpu::momentum_pack(
        array(bufs[row.tensor], row.offset), array(grads[row.tensor], row.offset),
        array(outs[row.other], row.other_offset), begin, end, rate[2 * row.matrix], rate[2 * row.matrix + 1] != 0.0);
  });
}

void momentum_pack_int8(
    at::TensorList codes, at::TensorList scales, at::TensorList grads, at::TensorList outs, const at::Tensor& table,
    const at::Tensor& rates, const at::Tensor& blocks) {
  constexpr const char* op = "momentum_pack_int8_";
  const at::ArrayRef<FlatRow> rows = muon::flat_rows(op, table, grads, outs);
  const double* const rate = muon::flat_rates(op, rates, rows);
  const auto coded = muon::code_blocks(codes, scales, grads, rows, blocks);
  // Threads share the blocks, not the elements.
  std::vector<FlatRow> in_blocks(rows.begin(), rows.end());
  for (size_t i = 0; i < rows.size(); ++i) in_blocks[i].numel = rows[i].numel == 0 ? 0 : coded[i].count(rows[i].numel);
  const auto run = [&](const FlatRow& row, int64_t begin, int64_t end) {
    const int64_t number = &row - in_blocks.data();
    muon::cpu::momentum_pack_int8(
        const_cast<int8_t*>(codes[row.tensor].const_data_ptr<int8_t>()) + row.offset, coded[number],
        array(grads[row.tensor], row.offset), array(outs[row.other], row.other_offset), rows[number].numel, begin, end,
        rate[2 * row.matrix], rate[2 * row.matrix + 1] != 0.0);
  };
  for_fragments(in_blocks, run, kGrain / muon::kCodeBlock);
}

void unpack_apply(at::TensorList params, at::TensorList updates, const at::Tensor& table, const at::Tensor& rates) {
  const at::ArrayRef<FlatRow> rows = muon::flat_rows("unpack_apply_", table, params, updates);
  const double* const rate = muon::flat_rates("unpack_apply_", rates, rows);
  for_fragments(rows, [&](const FlatRow& row, int64_t begin, int64_t end) {
    muon::cpu::unpack_apply(
        array(params[row.tensor], row.offset), array(updates[row.other], row.other_offset), begin, end,
        rate[2 * row.matrix], rate[2 * row.matrix + 1]);
  });
}

}  // namespace

TORCH_LIBRARY(deepspeed_muon, m) {
  // alpha a b^T + beta c + diag I, (m, k) or (batch, m, k), for a result known to be symmetric.
  m.def("sym_gemm(Tensor a, Tensor b, Tensor? c, float alpha, float beta, float diag) -> Tensor");
  // coefficients: flat (a, b, c) triples, one a step; restarts: completed steps after which Gram starts afresh.
  m.def(
      "orthogonalize(Tensor x, float[] coefficients, str method, int[] restarts, ScalarType dtype, float eps)"
      " -> Tensor");
  // x^T / norms in dtype, contiguous: what the iteration over products of the device begins with where x is tall.
  m.def("divide_transposed(Tensor x, Tensor norms, ScalarType dtype) -> Tensor");
  // table: int64 rows, see FlatRow in binding_checks.h. rates: float64 (matrices, 2): decay of the momentum, and whether
  // Nesterov's blend follows.
  m.def(
      "momentum_pack_(Tensor(a!)[] bufs, Tensor[] grads, Tensor(b!)[] outs, Tensor table, Tensor rates) -> ()");
  // Momentum in 8 bits. blocks: int64 rows, see CodeRow in binding_checks.h.
  m.def(
      "momentum_pack_int8_(Tensor(a!)[] codes, Tensor(b!)[] scales, Tensor[] grads, Tensor(c!)[] outs, Tensor table,"
      " Tensor rates, Tensor blocks) -> ()");
  // rates: learning rate times scale, and the factor of the weights.
  m.def("unpack_apply_(Tensor(a!)[] params, Tensor[] updates, Tensor table, Tensor rates) -> ()");
}

TORCH_LIBRARY_IMPL(deepspeed_muon, CPU, m) {
  m.impl("momentum_pack_", &momentum_pack);
  m.impl("momentum_pack_int8_", &momentum_pack_int8);
  m.impl("unpack_apply_", &unpack_apply);
}
