// The schemas of all operators, and their CPU kernels. One schema serves every device: the CUDA kernels are registered
// by binding_cuda.cpp, and the shape functions for Meta and fake tensors are Python (ops/library.py).
//
// This is the only CPU source with torch/library.h, which costs seconds to compile.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "binding_checks.h"
#include "cpu/flat.h"
#include "cpu/kernels.h"
#include "cpu/tiles.h"
#include "generic.h"

namespace {

using muon::cpu::element;
using muon::cpu::Element;

// Elements a thread must get before another one is worth waking.
constexpr int64_t kGrain = 1 << 15;

void momentum_pack(at::Tensor& buf, const at::Tensor& grad, at::Tensor& out, double momentum, bool nesterov) {
  muon::check_momentum_pack(buf, grad, out);
  float* const b = buf.data_ptr<float>();
  const float* const g = grad.const_data_ptr<float>();
  void* const o = out.data_ptr();
  const Element type = element(out.scalar_type());
  at::parallel_for(0, buf.numel(), kGrain, [&](int64_t begin, int64_t end) {
    muon::cpu::momentum_pack(b, g, o, type, begin, end, momentum, nesterov);
  });
}

void unpack_apply(at::Tensor& param, const at::Tensor& update, double lr_scale, double decay) {
  muon::check_unpack_apply(param, update);
  float* const p = param.data_ptr<float>();
  const void* const u = update.const_data_ptr();
  const Element type = element(update.scalar_type());
  at::parallel_for(0, param.numel(), kGrain, [&](int64_t begin, int64_t end) {
    muon::cpu::unpack_apply(p, u, type, begin, end, lr_scale, decay);
  });
}

at::Tensor frobenius_norms(const at::Tensor& x) {
  muon::check_frobenius_norms(x);
  // The order of the elements does not matter: a batch of transposed matrices is read as it is stored.
  const at::Tensor turned = x.transpose(-2, -1);
  const at::Tensor stored = !x.is_contiguous() && turned.is_contiguous() ? turned : x.contiguous();
  const at::Tensor norms = at::empty(x.sizes().slice(0, x.dim() - 2), x.options().dtype(at::kFloat).requires_grad(false));
  const int64_t numel = x.size(-2) * x.size(-1), count = norms.numel();
  // Each piece is summed by one thread, so the result does not depend on their number.
  const int64_t pieces = std::max<int64_t>(1, (numel + kGrain - 1) / kGrain);
  std::vector<double> sums(count * pieces);
  const void* const data = stored.const_data_ptr();
  const Element type = element(stored.scalar_type());
  at::parallel_for(0, count * pieces, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, numel)), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t first = index / pieces * numel, start = index % pieces * kGrain;
      sums[index] = muon::cpu::squared_norm(data, type, first + start, first + std::min(numel, start + kGrain));
    }
  });
  float* const out = norms.data_ptr<float>();
  for (int64_t index = 0; index < count; ++index) {
    const double* const own = sums.data() + index * pieces;
    out[index] = static_cast<float>(std::sqrt(std::accumulate(own, own + pieces, 0.0)));
  }
  return norms;
}

at::Tensor orthogonalize(
    const at::Tensor& x, at::ArrayRef<double> coefficients, std::string method, at::IntArrayRef restarts,
    at::ScalarType dtype, double eps) {
  return muon::cpu::orthogonalize(x, coefficients, method, restarts, dtype, eps);
}

}  // namespace

TORCH_LIBRARY(deepspeed_muon, m) {
  // alpha a b^T + beta c + diag I, (m, k) or (batch, m, k), for a result known to be symmetric.
  m.def("sym_gemm(Tensor a, Tensor b, Tensor? c, float alpha, float beta, float diag) -> Tensor");
  // coefficients: flat (a, b, c) triples, one a step; restarts: completed steps after which Gram starts afresh.
  m.def(
      "orthogonalize(Tensor x, float[] coefficients, str method, int[] restarts, ScalarType dtype, float eps)"
      " -> Tensor");
  m.def("momentum_pack_(Tensor(a!) buf, Tensor grad, Tensor(b!) out, float momentum, bool nesterov) -> ()");
  // (..., rows, cols) of float32, bfloat16 or float16 -> (...) of float32.
  m.def("frobenius_norms(Tensor x) -> Tensor");
  // Whether method "...+tiles" of orthogonalize runs on this processor.
  m.def("tiles_available() -> bool", &muon::cpu::tiles::available);
  m.def("vectors_available() -> bool", &muon::cpu::tiles::vectors_available);
  m.def("unpack_apply_(Tensor(a!) param, Tensor update, float lr_scale, float decay) -> ()");
}

TORCH_LIBRARY_IMPL(deepspeed_muon, CPU, m) {
  m.impl("sym_gemm", &muon::cpu::sym_gemm);
  m.impl("orthogonalize", &orthogonalize);
  m.impl("frobenius_norms", &frobenius_norms);
  m.impl("momentum_pack_", &momentum_pack);
  m.impl("unpack_apply_", &unpack_apply);
}

// Only products of the device: its sym_gemm is registered by binding_cuda.cpp where that is part of the build.
TORCH_LIBRARY_IMPL(deepspeed_muon, CUDA, m) {
  m.impl("orthogonalize", &muon::orthogonalize_by_products);
}
