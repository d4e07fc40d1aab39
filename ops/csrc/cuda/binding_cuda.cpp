// The CUDA kernels as implementations of the schemas in binding.cpp.
//
// sym_gemm runs this project's kernel where it supports dtype, shape, alignment and device, and cuBLAS elsewhere; both
// return the mirrored lower triangle. sym_gemm_kernel says which one runs, for the rule of ops/dispatch.py.
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "../binding_checks.h"
#include "../include/muon_cuda.h"
#include "iteration.h"

namespace {

int32_t muon_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return MUON_FLOAT32;
    case at::kHalf:
      return MUON_FLOAT16;
    case at::kBFloat16:
      return MUON_BFLOAT16;
    case at::kChar:
      return MUON_INT8;
    default:
      return -1;
  }
}

muon_stream_t stream_of(const at::Tensor& t) { return c10::cuda::getCurrentCUDAStream(t.get_device()).stream(); }

void check_status(int status, const char* op) {
  TORCH_CHECK(status == MUON_OK, op, ": ", muon_status_name(status));
}

// A tensor as (batch, m, n) with unit stride along a row, copied only where it is not so already.
at::Tensor batched_rows(const at::Tensor& t) {
  const at::Tensor batch = t.dim() == 2 ? t.unsqueeze(0) : t;
  return batch.stride(2) == 1 && batch.stride(1) >= batch.size(2) ? batch : batch.contiguous();
}

at::Tensor sym_gemm_cublas(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double alpha, double beta,
    double diag) {
  at::Tensor d = c.has_value() && beta != 0.0 ? at::baddbmm(*c, a, b.mT(), beta, alpha)
                                              : at::bmm(a, b.mT()).mul_(alpha);
  if (diag != 0.0) d.diagonal(0, -2, -1).add_(diag);
  return d.tril_().add_(d.tril(-1).mT());
}

at::Tensor sym_gemm(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double alpha, double beta,
    double diag) {
  return muon::sym_gemm(a, b, c, alpha, beta, diag, at::zeros({1}, a.options().dtype(at::kInt)));
}

}  // namespace

at::Tensor muon::sym_gemm(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double alpha, double beta,
    double diag, const at::Tensor& counter) {
  TORCH_CHECK(a.dim() == 2 || a.dim() == 3, "sym_gemm: a must be (m, k) or (batch, m, k), got ", a.sizes());
  TORCH_CHECK(
      b.sizes() == a.sizes() && b.scalar_type() == a.scalar_type() && b.device() == a.device(),
      "sym_gemm: b must have shape ", a.sizes(), ", dtype and device of a, got ", b.sizes(), " ", b.scalar_type());
  std::vector<int64_t> shape = a.sizes().vec();
  shape.back() = a.size(-2);
  TORCH_CHECK(
      !c.has_value() || (c->sizes() == shape && c->scalar_type() == a.scalar_type() && c->device() == a.device()),
      "sym_gemm: c must have shape ", shape, ", dtype and device of a");
  const c10::cuda::CUDAGuard guard(a.device());
  const at::Tensor left = batched_rows(a);
  const at::Tensor right = batched_rows(b);
  const std::optional<at::Tensor> added = c.has_value() ? std::optional(batched_rows(*c)) : std::nullopt;
  const at::Tensor d = at::empty({left.size(0), left.size(1), left.size(1)}, a.options());
  MuonSymGemm problem{};
  problem.a = left.const_data_ptr();
  problem.b = right.const_data_ptr();
  problem.c = added.has_value() ? added->const_data_ptr() : nullptr;
  problem.d = d.data_ptr();
  problem.counter = static_cast<uint32_t*>(counter.data_ptr());
  problem.batch = left.size(0);
  problem.m = left.size(1);
  problem.k = left.size(2);
  problem.lda = left.stride(1);
  problem.ldb = right.stride(1);
  problem.ldc = added.has_value() ? added->stride(1) : 0;
  problem.ldd = d.stride(1);
  problem.stride_a = left.stride(0);
  problem.stride_b = right.stride(0);
  problem.stride_c = added.has_value() ? added->stride(0) : 0;
  problem.stride_d = d.stride(0);
  problem.alpha = static_cast<float>(alpha);
  problem.beta = static_cast<float>(beta);
  problem.diag = static_cast<float>(diag);
  problem.dtype = muon_dtype(a.scalar_type());
  const int status = muon_sym_gemm(&problem, stream_of(a));
  if (status == MUON_OK) return d.view(shape);
  // Negative: not for this kernel, nothing was launched. A CUDA error, or a wrong argument, is no reason to go on.
  TORCH_CHECK(status < 0 && status != MUON_BAD_ARGUMENT, "sym_gemm: ", muon_status_name(status));
  return sym_gemm_cublas(left, right, added, alpha, beta, diag).view(shape);
}

at::Tensor muon::divide_transposed(const at::Tensor& x, const at::Tensor& norms, at::ScalarType dtype) {
  muon::check_divide_transposed(x, norms);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor out = at::empty({x.size(0), x.size(2), x.size(1)}, x.options().dtype(dtype));
  MuonDivideTransposed problem{};
  problem.x = x.const_data_ptr();
  problem.norms = static_cast<const float*>(norms.const_data_ptr());
  problem.out = out.data_ptr();
  problem.batch = x.size(0);
  problem.rows = x.size(1);
  problem.cols = x.size(2);
  problem.stride_matrix = x.stride(0);
  problem.stride_row = x.stride(1);
  problem.stride_col = x.stride(2);
  problem.x_dtype = muon_dtype(x.scalar_type());
  problem.out_dtype = muon_dtype(dtype);
  const int status = muon_divide_transposed(&problem, stream_of(x));
  if (status == MUON_OK) return out;
  TORCH_CHECK(status < 0 && status != MUON_BAD_ARGUMENT, "divide_transposed: ", muon_status_name(status));
  return divided(x.mT(), norms, dtype);
}

at::Tensor muon::squares(const at::Tensor& x) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor contiguous = x.contiguous();
  MuonSquares problem{};
  problem.batch = x.size(0);
  problem.numel = x.size(1) * x.size(2);
  problem.parts = std::clamp<int64_t>(problem.numel / 4096, 1, 4096);
  const at::Tensor sums = at::empty({problem.batch, problem.parts, 2}, x.options().dtype(at::kFloat));
  problem.x = contiguous.const_data_ptr();
  problem.sums = static_cast<float*>(sums.data_ptr());
  problem.dtype = muon_dtype(x.scalar_type());
  check_status(muon_squares(&problem, stream_of(x)), "squares");
  return sums;
}

namespace {

const char* pointer(const at::Tensor& t, int64_t offset) {
  return static_cast<const char*>(t.const_data_ptr()) + offset * t.element_size();
}

// A launcher takes arrays of one dtype each. Almost always there is one combination.
template <typename Row>
using RowsOfDtypes = std::map<std::array<int32_t, 3>, std::vector<Row>>;

// With `blocks` of each fragment, `bufs` are codes.
void pack(
    const char* op, at::TensorList bufs, at::TensorList grads, at::TensorList outs,
    at::ArrayRef<muon::FlatRow> fragments, const at::Tensor& rates, at::ArrayRef<muon::CodeBlocks> blocks) {
  const double* const rate = muon::flat_rates(op, rates, fragments);
  RowsOfDtypes<MuonPackRow> found;
  for (size_t i = 0; i < fragments.size(); ++i) {
    const muon::FlatRow& each = fragments[i];
    const muon::CodeBlocks own = blocks.empty() ? muon::CodeBlocks{} : blocks[i];
    const at::Tensor &buf = bufs[each.tensor], &grad = grads[each.tensor], &out = outs[each.other];
    found[{muon_dtype(buf.scalar_type()), muon_dtype(grad.scalar_type()), muon_dtype(out.scalar_type())}].push_back(
        {const_cast<char*>(pointer(buf, each.offset)), pointer(grad, each.offset),
         const_cast<char*>(pointer(out, each.other_offset)), each.numel, rate[2 * each.matrix],
         rate[2 * each.matrix + 1] != 0.0, static_cast<int32_t>(own.before), own.scales});
  }
  if (found.empty()) return;
  const c10::cuda::CUDAGuard guard(bufs[0].device());
  for (const auto& [dtypes, rows] : found) {
    check_status(
        muon_momentum_pack(
            rows.data(), static_cast<int64_t>(rows.size()), dtypes[0], dtypes[1], dtypes[2], stream_of(bufs[0])),
        op);
  }
}

void momentum_pack(
    at::TensorList bufs, at::TensorList grads, at::TensorList outs, const at::Tensor& table, const at::Tensor& rates) {
  muon::check_momentum_pack(bufs, grads);
  pack("momentum_pack_", bufs, grads, outs, muon::flat_rows("momentum_pack_", table, bufs, outs), rates, {});
}

void momentum_pack_int8(
    at::TensorList codes, at::TensorList scales, at::TensorList grads, at::TensorList outs, const at::Tensor& table,
    const at::Tensor& rates, const at::Tensor& blocks) {
  const auto rows = muon::flat_rows("momentum_pack_int8_", table, grads, outs);
  const auto own = muon::code_blocks(codes, scales, grads, rows, blocks);
  pack("momentum_pack_int8_", codes, grads, outs, rows, rates, own);
}

void unpack_apply(at::TensorList params, at::TensorList updates, const at::Tensor& table, const at::Tensor& rates) {
  constexpr const char* op = "unpack_apply_";
  const auto fragments = muon::flat_rows(op, table, params, updates);
  if (fragments.empty()) return;
  const double* const rate = muon::flat_rates(op, rates, fragments);
  RowsOfDtypes<MuonApplyRow> found;
  for (const muon::FlatRow& fragment : fragments) {
    const at::Tensor &param = params[fragment.tensor], &update = updates[fragment.other];
    found[{muon_dtype(param.scalar_type()), muon_dtype(update.scalar_type()), 0}].push_back(
        {const_cast<char*>(pointer(param, fragment.offset)), pointer(update, fragment.other_offset), fragment.numel,
         rate[2 * fragment.matrix], rate[2 * fragment.matrix + 1]});
  }
  const c10::cuda::CUDAGuard guard(params[0].device());
  for (const auto& [dtypes, rows] : found) {
    check_status(
        muon_unpack_apply(rows.data(), static_cast<int64_t>(rows.size()), dtypes[0], dtypes[1], stream_of(params[0])),
        op);
  }
}

// What sym_gemm's own kernel would be on a device: "sm90", or why there is none.
std::string sym_gemm_kernel(int64_t device) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const int status = muon_sym_gemm_available();
  return status == MUON_OK ? "sm90" : muon_status_name(status);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(deepspeed_muon, m) {
  m.def("sym_gemm_kernel(int device) -> str", &sym_gemm_kernel);
}

TORCH_LIBRARY_IMPL(deepspeed_muon, CUDA, m) {
  m.impl("sym_gemm", &sym_gemm);
  m.impl("orthogonalize", &muon::orthogonalize);
  m.impl("divide_transposed", &muon::divide_transposed);
  m.impl("momentum_pack_", &momentum_pack);
  m.impl("momentum_pack_int8_", &momentum_pack_int8);
  m.impl("unpack_apply_", &unpack_apply);
}
