// The checks of arguments that the CPU and the CUDA kernels share.
#pragma once

#include <ATen/core/Tensor.h>

namespace muon {

inline void check_flat(const at::Tensor& t, const char* op, const char* name, const at::Tensor& like) {
  TORCH_CHECK(
      t.dim() == 1 && t.is_contiguous() && t.numel() == like.numel(), op, ": ", name,
      " must be a contiguous one-dimensional tensor of ", like.numel(), " elements, got shape ", t.sizes(),
      " strides ", t.strides());
  TORCH_CHECK(
      t.device() == like.device(), op, ": ", name, " is on ", t.device(), ", the first tensor on ", like.device());
}

inline void check_float(const at::Tensor& t, const char* op, const char* name) {
  TORCH_CHECK(t.scalar_type() == at::kFloat, op, ": ", name, " must be float32, got ", t.scalar_type());
}

inline void check_wire(const at::Tensor& t, const char* op, const char* name) {
  const at::ScalarType type = t.scalar_type();
  TORCH_CHECK(
      type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, op, ": ", name,
      " must be float32, bfloat16 or float16, got ", type);
}

inline void check_momentum_pack(const at::Tensor& buf, const at::Tensor& grad, const at::Tensor& out) {
  constexpr const char* op = "momentum_pack_";
  check_flat(buf, op, "buf", buf);
  check_flat(grad, op, "grad", buf);
  check_flat(out, op, "out", buf);
  check_float(buf, op, "buf");
  check_float(grad, op, "grad");
  check_wire(out, op, "out");
}

inline void check_unpack_apply(const at::Tensor& param, const at::Tensor& update) {
  constexpr const char* op = "unpack_apply_";
  check_flat(param, op, "param", param);
  check_flat(update, op, "update", param);
  check_float(param, op, "param");
  check_wire(update, op, "update");
}

inline void check_frobenius_norms(const at::Tensor& x) {
  TORCH_CHECK(x.dim() >= 2, "frobenius_norms: x must be (..., rows, cols), got shape ", x.sizes());
  check_wire(x, "frobenius_norms", "x");
}

}  // namespace muon
