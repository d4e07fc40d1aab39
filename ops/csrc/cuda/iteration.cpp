#include "iteration.h"

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <string>
#include <vector>

namespace muon {

at::Tensor divided(const at::Tensor& x, const at::Tensor& norms, at::ScalarType dtype) {
  at::Tensor result = at::empty(x.sizes(), x.options().dtype(dtype));
  at::div_out(result, x, norms);
  return result;
}

namespace {

// The Frobenius norms, (batch, 1, 1), each at least `smallest`.
at::Tensor divisors(const at::Tensor& x, double smallest) {
  if (x.scalar_type() == at::kDouble) {
    return at::linalg_vector_norm(x, 2, at::IntArrayRef({-2, -1}), true).clamp_min_(smallest);
  }
  const at::Tensor roots = at::sum(squares(x), at::IntArrayRef({1})).sqrt_();  // (batch, 2)
  const at::Tensor norms = roots.select(1, 0), enlarged = roots.select(1, 1);
  return at::where(at::lt(norms, 1e-12), at::mul(enlarged, 0x1p-80), norms).clamp_min_(smallest).view({-1, 1, 1});
}

// Q X, written in the caller's orientation: a tall result is (X^T Q), which BLAS reads without a copy.
at::Tensor oriented(const at::Tensor& q, const at::Tensor& x, bool tall) {
  return tall ? at::bmm(x.mT(), q) : at::bmm(q, x);
}

// x is (batch, rows, cols); returns the same shape, contiguous, in `dtype`. `restart` has an entry for each number of
// completed steps.
at::Tensor iterate(
    const at::Tensor& x, at::ArrayRef<double> coefficients, bool gram, const std::vector<bool>& restart,
    at::ScalarType dtype, double eps) {
  const bool tall = x.size(-2) > x.size(-1);
  const at::Tensor norm = divisors(x, eps);
  // The cast writes the short side first, so that turning a tall matrix costs no pass of its own.
  at::Tensor w = tall ? divide_transposed(x, norm, dtype) : divided(x, norm, dtype);
  const int64_t steps = static_cast<int64_t>(coefficients.size() / 3);
  // One for all products, which follow each other on the stream: of this call, so that calls may run at the same time.
  const at::Tensor counter = at::zeros({1}, x.options().dtype(at::kInt));
  const auto sym = [&counter](
                       const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double alpha,
                       double beta, double diag) { return sym_gemm(a, b, c, alpha, beta, diag, counter); };
  if (!gram) {
    for (int64_t done = 1;; ++done) {
      const double a = coefficients[3 * done - 3], b = coefficients[3 * done - 2], c = coefficients[3 * done - 1];
      const at::Tensor r = sym(w, w, std::nullopt, 1.0, 0.0, 0.0);
      // With a on its diagonal the last square writes the caller's orientation, which baddbmm could only from a copy.
      if (done == steps) return oriented(sym(r, r, r, c, b, a), w, tall);
      w = at::baddbmm(w, sym(r, r, r, c, b, 0.0), w, a, 1.0);
    }
  }
  at::Tensor r = sym(w, w, std::nullopt, 1.0, 0.0, 0.0), q;
  for (int64_t done = 1; done <= steps; ++done) {
    const double a = coefficients[3 * done - 3], b = coefficients[3 * done - 2], c = coefficients[3 * done - 1];
    const bool last = done == steps, stop = last || restart[done];
    if (!q.defined() && stop) {
      q = sym(r, r, r, c, b, a);
    } else {
      const at::Tensor z = sym(r, r, r, c, b, 0.0);
      if (q.defined()) {
        q = sym(z, q, q, 1.0, a, 0.0);
      } else {
        q = z.clone();
        q.diagonal(0, -2, -1).add_(a);
      }
      if (!stop) {
        const at::Tensor rz = sym(z, r, r, 1.0, a, 0.0);
        r.reset();  // never more than four Gram-sized matrices
        r = sym(z, rz, rz, 1.0, a, 0.0);
      }
    }
    if (last) {
      break;
    }
    if (stop) {
      r.reset();
      w = at::bmm(q, w);
      r = sym(w, w, std::nullopt, 1.0, 0.0, 0.0);
      q = at::Tensor();
    }
  }
  r.reset();
  return oriented(q, w, tall);
}

}  // namespace

at::Tensor orthogonalize(
    const at::Tensor& x, at::ArrayRef<double> coefficients, std::string method, at::IntArrayRef restarts,
    at::ScalarType dtype, double eps) {
  TORCH_CHECK(x.dim() >= 2, "orthogonalize: needs (..., rows, cols), got shape ", x.sizes());
  TORCH_CHECK(
      at::isFloatingType(x.scalar_type()) && at::isFloatingType(dtype), "orthogonalize: needs floating dtypes, got ",
      x.scalar_type(), " and ", dtype);
  TORCH_CHECK(
      !coefficients.empty() && coefficients.size() % 3 == 0,
      "orthogonalize: coefficients must be flat (a, b, c) triples, got ", coefficients.size(), " numbers");
  TORCH_CHECK(
      method == "gram" || method == "standard", "orthogonalize: unknown method '", method,
      "'; there are standard and gram");
  TORCH_CHECK(eps > 0.0, "orthogonalize: eps must be positive, got ", eps);
  const int64_t steps = static_cast<int64_t>(coefficients.size() / 3);
  std::vector<bool> restart(steps + 1, false);
  for (const int64_t done : restarts) {
    TORCH_CHECK(0 < done && done < steps, "orthogonalize: a restart must come after step 1 to ", steps - 1, ", got ", done);
    restart[done] = true;
  }
  // The result is stored in the order of the input.
  const bool transposed = !x.is_contiguous() && x.mT().is_contiguous();
  const at::Tensor stored = transposed ? x.mT() : x;
  if (x.numel() == 0) {
    const at::Tensor empty = at::empty(stored.sizes(), stored.options().dtype(dtype));
    return transposed ? empty.mT() : empty;
  }
  const at::Tensor batch = stored.detach().reshape({-1, stored.size(-2), stored.size(-1)});
  const at::Tensor out =
      iterate(batch, coefficients, method == "gram", restart, dtype, eps).view(stored.sizes());
  return transposed ? out.mT() : out;
}

}  // namespace muon
