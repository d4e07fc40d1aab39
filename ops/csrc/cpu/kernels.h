// The operators on a CPU, as binding.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "flat.h"

namespace muon::cpu {

// Of one of the three types that the passes take.
inline Element element(at::ScalarType type) {
  return type == at::kFloat ? Element::fp32 : type == at::kBFloat16 ? Element::bf16 : Element::fp16;
}

at::Tensor sym_gemm(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double alpha, double beta,
    double diag);

at::Tensor orthogonalize(
    const at::Tensor& x, at::ArrayRef<double> coefficients, const std::string& method, at::IntArrayRef restarts,
    at::ScalarType dtype, double eps);

}  // namespace muon::cpu
