// The Newton-Schulz iteration over the products of binding_cuda.cpp, and ATen's batched ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace muon {

// x / norms, contiguous, in `dtype`: one pass, without a copy in the dtype of the quotient.
at::Tensor divided(const at::Tensor& x, const at::Tensor& norms, at::ScalarType dtype);

// The operator of this name; see its schema in binding.cpp.
at::Tensor orthogonalize(
    const at::Tensor& x, at::ArrayRef<double> coefficients, std::string method, at::IntArrayRef restarts,
    at::ScalarType dtype, double eps);

}  // namespace muon
