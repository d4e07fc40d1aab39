// The schemas of all operators, and their CPU kernels. One schema serves every device: the CUDA kernels are registered
// by binding_cuda.cpp, and the shape functions for Meta and fake tensors are Python (ops/library.py).
//
// This is the only CPU source with torch/library.h, which costs seconds to compile.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "binding_checks.h"
#include "cpu/flat.h"
#include "cpu/kernels.h"
#include "cpu/tiles.h"
#include "generic.h"

namespace {

using muon::cpu::Element;

// Elements a thread must get before another one is worth waking.
constexpr int64_t kGrain = 1 << 15;

Element element(at::ScalarType type) {
  return type == at::kFloat ? Element::fp32 : type == at::kBFloat16 ? Element::bf16 : Element::fp16;
}

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
  // Whether method "...+tiles" of orthogonalize runs on this processor.
  m.def("tiles_available() -> bool", &muon::cpu::tiles::available);
  m.def("vectors_available() -> bool", &muon::cpu::tiles::vectors_available);
  m.def("unpack_apply_(Tensor(a!) param, Tensor update, float lr_scale, float decay) -> ()");
}

TORCH_LIBRARY_IMPL(deepspeed_muon, CPU, m) {
  m.impl("sym_gemm", &muon::cpu::sym_gemm);
  m.impl("orthogonalize", &orthogonalize);
  m.impl("momentum_pack_", &momentum_pack);
  m.impl("unpack_apply_", &unpack_apply);
}

// Only products of the device: its sym_gemm is registered by binding_cuda.cpp where that is part of the build.
TORCH_LIBRARY_IMPL(deepspeed_muon, CUDA, m) {
  m.impl("orthogonalize", &muon::orthogonalize_by_products);
}
