// The Newton-Schulz iteration over any device's products: ATen's batched ones, and operators of that device.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace muon {

// x is (batch, rows, cols); returns the same shape, contiguous, in `dtype`. `coefficients` are flat triples, `restart`
// has one entry more than there are steps; see the schema of orthogonalize.
at::Tensor orthogonalize_generic(
    const at::Tensor& x, at::ArrayRef<double> coefficients, bool gram, const std::vector<bool>& restart,
    at::ScalarType dtype, double eps);

// x / norms, contiguous, in `dtype`: one pass, without a copy in the dtype of the quotient.
at::Tensor divided(const at::Tensor& x, const at::Tensor& norms, at::ScalarType dtype);

// The kernel for devices without one of their own: checks, then orthogonalize_generic.
at::Tensor orthogonalize_by_products(
    const at::Tensor& x, at::ArrayRef<double> coefficients, std::string method, at::IntArrayRef restarts,
    at::ScalarType dtype, double eps);

}  // namespace muon
