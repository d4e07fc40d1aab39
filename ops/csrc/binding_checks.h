// The checks of arguments that the CPU and the CUDA kernels share, and the rows of the flat passes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "include/code_blocks.h"

namespace muon {

// One fragment of a flat pass, a row of its int64 table: `numel` elements from `offset` on of one tensor, and from
// `other_offset` on of another one; `matrix` is its row in the rates.
struct FlatRow {
  int64_t tensor, offset, other, other_offset, numel, matrix;
};
constexpr int64_t kFlatColumns = sizeof(FlatRow) / sizeof(int64_t);

inline void check_wire(const at::Tensor& t, const char* op, const char* name) {
  const at::ScalarType type = t.scalar_type();
  TORCH_CHECK(
      type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, op, ": ", name,
      " must be float32, bfloat16 or float16, got ", type);
}

inline void check_flat(at::TensorList tensors, const char* op, const char* name, at::Device device) {
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK(
        t.dim() == 1 && t.is_contiguous(), op, ": ", name, " must be contiguous one-dimensional tensors, got shape ",
        t.sizes(), " strides ", t.strides());
    TORCH_CHECK(t.device() == device, op, ": ", name, " must be on ", device, ", got ", t.device());
    check_wire(t, op, name);
  }
}

inline bool inside(int64_t tensor, int64_t offset, int64_t numel, at::TensorList tensors) {
  return tensor >= 0 && tensor < static_cast<int64_t>(tensors.size()) && offset >= 0 && numel >= 0 &&
         numel <= tensors[tensor].numel() && offset <= tensors[tensor].numel() - numel;
}

// The rows of a table of fragments of `tensors`, which lie in `others` too; both flat, on one device.
inline at::ArrayRef<FlatRow> flat_rows(
    const char* op, const at::Tensor& table, at::TensorList tensors, at::TensorList others) {
  TORCH_CHECK(
      table.dim() == 2 && table.size(1) == kFlatColumns && table.scalar_type() == at::kLong && table.is_contiguous() &&
          table.device().is_cpu(),
      op, ": the table must be a contiguous int64 tensor (fragments, ", kFlatColumns, ") on the CPU, got ",
      table.scalar_type(), " ", table.sizes());
  if (tensors.empty() || others.empty()) {
    TORCH_CHECK(table.size(0) == 0, op, ": the table has fragments of no tensor");
    return {};
  }
  check_flat(tensors, op, "each of the first tensors", tensors[0].device());
  check_flat(others, op, "each of the other tensors", tensors[0].device());
  const at::ArrayRef<FlatRow> rows(
      reinterpret_cast<const FlatRow*>(table.const_data_ptr<int64_t>()), static_cast<size_t>(table.size(0)));
  for (const FlatRow& row : rows) {
    TORCH_CHECK(
        inside(row.tensor, row.offset, row.numel, tensors) && inside(row.other, row.other_offset, row.numel, others),
        op, ": a fragment of ", row.numel, " elements at ", row.offset, " of tensor ", row.tensor, " and ",
        row.other_offset, " of tensor ", row.other, " is outside of them");
  }
  return rows;
}

// The two rates of each matrix, which the host reads: `rates` is (matrices, 2).
inline const double* flat_rates(const char* op, const at::Tensor& rates, at::ArrayRef<FlatRow> rows) {
  TORCH_CHECK(
      rates.dim() == 2 && rates.size(1) == 2 && rates.scalar_type() == at::kDouble && rates.is_contiguous() &&
          rates.device().is_cpu(),
      op, ": the rates must be a contiguous float64 tensor (matrices, 2) on the CPU, got ", rates.scalar_type(), " ",
      rates.sizes(), " on ", rates.device());
  for (const FlatRow& row : rows) {
    TORCH_CHECK(
        row.matrix >= 0 && row.matrix < rates.size(0), op, ": there are no rates of matrix ", row.matrix);
  }
  return rates.const_data_ptr<double>();
}

// grads has a tensor of the same length for each of bufs.
inline void check_momentum_pack(at::TensorList bufs, at::TensorList grads) {
  TORCH_CHECK(
      bufs.size() == grads.size(), "momentum_pack_: there are ", bufs.size(), " momentum tensors and ", grads.size(),
      " gradients");
  if (bufs.empty()) return;
  check_flat(grads, "momentum_pack_", "each gradient", bufs[0].device());
  for (size_t i = 0; i < bufs.size(); ++i) {
    TORCH_CHECK(
        bufs[i].numel() == grads[i].numel(), "momentum_pack_: momentum ", i, " has ", bufs[i].numel(),
        " elements, its gradient ", grads[i].numel());
  }
}

// What a fragment of a table has in 8 bits: `before` of CodeBlocks, and the number of its first block's scale.
struct CodeRow {
  int64_t before, scale;
};

// The blocks of each fragment of a table of momentum in 8 bits, in tensors like `grads`.
inline std::vector<CodeBlocks> code_blocks(
    at::TensorList codes, at::TensorList scales, at::TensorList grads, at::ArrayRef<FlatRow> rows,
    const at::Tensor& blocks) {
  constexpr const char* op = "momentum_pack_int8_";
  TORCH_CHECK(
      codes.size() == grads.size() && scales.size() == grads.size(), op, ": there are ", codes.size(), " codes, ",
      scales.size(), " scales and ", grads.size(), " gradients");
  for (size_t i = 0; i < codes.size(); ++i) {
    TORCH_CHECK(
        codes[i].scalar_type() == at::kChar && codes[i].is_contiguous() && codes[i].device() == grads[i].device() &&
            codes[i].numel() == grads[i].numel(),
        op, ": codes ", i, " must be int8 and contiguous, beside the gradient and as long");
  }
  if (!scales.empty()) check_flat(scales, op, "each of the scales", grads[0].device());
  TORCH_CHECK(
      blocks.dim() == 2 && blocks.size(0) == static_cast<int64_t>(rows.size()) && blocks.size(1) == 2 &&
          blocks.scalar_type() == at::kLong && blocks.is_contiguous() && blocks.device().is_cpu(),
      op, ": blocks must be a contiguous int64 tensor (fragments, 2) on the CPU, got ", blocks.sizes());
  const auto* const given = reinterpret_cast<const CodeRow*>(blocks.const_data_ptr<int64_t>());
  std::vector<CodeBlocks> found;
  for (size_t i = 0; i < rows.size(); ++i) {
    const CodeRow& row = given[i];
    const at::Tensor& own = scales[rows[i].tensor];
    const int64_t count = CodeBlocks{nullptr, row.before}.count(rows[i].numel);
    TORCH_CHECK(
        own.scalar_type() == at::kFloat && row.before >= 0 && row.before < kCodeBlock && row.scale >= 0 &&
            count <= own.numel() && row.scale <= own.numel() - count,
        op, ": the blocks of fragment ", i, " are outside of the scales");
    found.push_back({const_cast<float*>(own.const_data_ptr<float>()) + row.scale, row.before});
  }
  return found;
}

inline void check_divide_transposed(const at::Tensor& x, const at::Tensor& norms) {
  const at::ScalarType norm_dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK(
      x.dim() == 3 && norms.sizes() == at::IntArrayRef({x.size(0), 1, 1}) && norms.scalar_type() == norm_dtype &&
          norms.is_contiguous() && norms.device() == x.device(),
      "divide_transposed: x must be (batch, rows, cols), and norms (batch, 1, 1), contiguous, in ", norm_dtype,
      " beside it, got ", x.sizes(), " and ", norms.sizes(), " in ", norms.scalar_type());
}

}  // namespace muon
