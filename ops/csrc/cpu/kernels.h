// The operators on a CPU, as binding.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace muon::cpu {

at::Tensor sym_gemm(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double alpha, double beta,
    double diag);

at::Tensor orthogonalize(
    const at::Tensor& x, at::ArrayRef<double> coefficients, const std::string& method, at::IntArrayRef restarts,
    at::ScalarType dtype, double eps);

}  // namespace muon::cpu
