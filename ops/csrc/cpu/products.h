// Products of matrices through ATen's BLAS, and the ones whose result is known to be symmetric.
#pragma once

#include <ATen/core/Tensor.h>

namespace muon::cpu {

// out = alpha a b + beta c. `c` may be undefined (beta is ignored) and may be `out` itself.
void product(
    at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double alpha, double beta);

// The same for a symmetric result. With `blocks`, only the blocks on and below the diagonal are computed; the rest is
// mirrored, also inside the diagonal blocks, so that the stored matrix is bitwise symmetric.
void symmetric_product(
    at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double alpha, double beta,
    bool blocks);

// Copies what is below the diagonal of a row-major (m, m) matrix onto what is above.
void mirror_lower(at::Tensor& matrix);

// Adds `value` to the diagonal of a (m, m) matrix.
void add_diagonal(at::Tensor& matrix, double value);

}  // namespace muon::cpu
