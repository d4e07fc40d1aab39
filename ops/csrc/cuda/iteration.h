// The Newton-Schulz iteration over the products of binding_cuda.cpp, and ATen's batched ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace muon {

// The operators of these names, defined in binding_cuda.cpp. `counter` is that of MuonSymGemm.
at::Tensor sym_gemm(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double alpha, double beta,
    double diag, const at::Tensor& counter);
at::Tensor divide_transposed(const at::Tensor& x, const at::Tensor& norms, at::ScalarType dtype);

// The sums of MuonSquares for x, (batch, rows, cols) in float32 or half precision.
at::Tensor squares(const at::Tensor& x);

// x / norms, contiguous, in `dtype`: one pass, without a copy in the dtype of the quotient.
at::Tensor divided(const at::Tensor& x, const at::Tensor& norms, at::ScalarType dtype);

// The operator of this name; see its schema in binding.cpp.
at::Tensor orthogonalize(
    const at::Tensor& x, at::ArrayRef<double> coefficients, std::string method, at::IntArrayRef restarts,
    at::ScalarType dtype, double eps);

}  // namespace muon
