#include "products.h"

#include "kernels.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <algorithm>

namespace muon::cpu {
namespace {

// Rows of a block of a triangle. Below twice this many a split costs more in small products than it saves.
constexpr int64_t kBlockRows = 256;

// Edge of the squares in which a triangle is mirrored: 32 x 32 elements of both sides stay in the first-level cache.
constexpr int64_t kMirrorEdge = 32;

}  // namespace

void product(
    at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double alpha, double beta) {
  if (c.defined() && beta != 0.0) {
    at::cpu::addmm_out(out, c, a, b, beta, alpha);
  } else if (alpha == 1.0) {
    at::cpu::mm_out(out, a, b);
  } else {
    at::cpu::addmm_out(out, out, a, b, 0.0, alpha);
  }
}

void mirror_lower(at::Tensor& matrix) {
  const int64_t m = matrix.size(0);
  const int64_t stride = matrix.stride(0);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, matrix.scalar_type(), "mirror_lower", [&] {
    scalar_t* const data = matrix.data_ptr<scalar_t>();
    const int64_t tiles = (m + kMirrorEdge - 1) / kMirrorEdge;
    at::parallel_for(0, tiles, 8, [&](int64_t begin, int64_t end) {
      for (int64_t ti = begin; ti < end; ++ti) {
        const int64_t i0 = ti * kMirrorEdge, i1 = std::min(m, i0 + kMirrorEdge);
        for (int64_t j0 = 0; j0 < i1; j0 += kMirrorEdge) {
          const int64_t j1 = std::min(m, j0 + kMirrorEdge);
          for (int64_t j = j0; j < j1; ++j) {
            for (int64_t i = std::max(i0, j + 1); i < i1; ++i) {
              data[j * stride + i] = data[i * stride + j];
            }
          }
        }
      }
    });
  });
}

void add_diagonal(at::Tensor& matrix, double value) {
  const int64_t m = matrix.size(0);
  const int64_t stride = matrix.stride(0) + matrix.stride(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, matrix.scalar_type(), "add_diagonal", [&] {
    scalar_t* const data = matrix.data_ptr<scalar_t>();
    for (int64_t i = 0; i < m; ++i) {
      data[i * stride] = static_cast<scalar_t>(static_cast<double>(data[i * stride]) + value);
    }
  });
}

void symmetric_product(
    at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double alpha, double beta,
    bool blocks) {
  const int64_t m = out.size(0);
  const int64_t count = blocks ? m / kBlockRows : 1;
  if (count < 2) {
    product(out, a, b, c, alpha, beta);
  } else {
    for (int64_t index = 0; index < count; ++index) {
      const int64_t begin = m * index / count, end = m * (index + 1) / count;
      at::Tensor part = out.narrow(0, begin, end - begin).narrow(1, 0, end);
      const at::Tensor addend =
          c.defined() ? c.narrow(0, begin, end - begin).narrow(1, 0, end) : at::Tensor();
      product(part, a.narrow(0, begin, end - begin), b.narrow(1, 0, end), addend, alpha, beta);
    }
  }
  mirror_lower(out);
}

at::Tensor sym_gemm(
    const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& c, double alpha, double beta,
    double diag) {
  TORCH_CHECK(
      (a.dim() == 2 || a.dim() == 3) && a.sizes() == b.sizes(),
      "sym_gemm: a and b must both be (m, k) or (batch, m, k), got ", a.sizes(), " and ", b.sizes());
  TORCH_CHECK(
      a.scalar_type() == b.scalar_type() && (!c || c->scalar_type() == a.scalar_type()),
      "sym_gemm: a, b and c must have one dtype");
  const int64_t m = a.size(-2);
  at::DimVector shape(a.sizes().begin(), a.sizes().end());
  shape.back() = m;
  TORCH_CHECK(!c || c->sizes() == shape, "sym_gemm: c must have shape ", at::IntArrayRef(shape), ", got ",
              c ? c->sizes() : at::IntArrayRef());
  at::Tensor out = at::empty(shape, a.options());
  if (out.numel() == 0) {
    return out;
  }
  // Blocks are for one thread: several small products synchronise more often, and collapse when cores are shared.
  const bool blocks = at::get_num_threads() == 1 || at::in_parallel_region();
  const auto flat = [](const at::Tensor& t) { return t.dim() == 2 ? t.unsqueeze(0) : t; };
  const at::Tensor left = flat(a), right = flat(b), target = flat(out), addend = c ? flat(*c) : at::Tensor();
  for (int64_t index = 0; index < target.size(0); ++index) {
    at::Tensor one = target.select(0, index);
    symmetric_product(
        one, left.select(0, index), right.select(0, index).t(), c ? addend.select(0, index) : at::Tensor(), alpha,
        beta, blocks);
    if (diag != 0.0) {
      add_diagonal(one, diag);
    }
  }
  return out;
}

}  // namespace muon::cpu
