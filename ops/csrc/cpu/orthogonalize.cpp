// The whole Newton-Schulz iteration in one call: the counterpart of deepspeed_muon/math/newton_schulz.py.
//
// A batch runs matrix by matrix (on a CPU bmm is slower than mm), and on several threads one matrix a thread: whole
// matrices need no synchronisation.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "../generic.h"
#include "kernels.h"
#include "products.h"
#include "tiles.h"

namespace muon::cpu {
namespace {

// A thread keeps its workspace between calls up to this many bytes: larger ones cost far more to fill than to get.
constexpr int64_t kWorkspaceBytes = int64_t(64) << 20;

struct Step {
  double a, b, c;
};

struct Plan {
  std::vector<Step> steps;
  std::vector<bool> restart;  // restart[done]: form X again after `done` completed steps
  bool gram = false;
  bool blocks = false;  // skip half of every symmetric product
  bool tiles = false;   // bf16 on matrix tiles, see tiles.h
  bool vectors = false; // the same on vector registers
  double eps = 0.0;
};

// Tensors of one dtype cut from one buffer that the calling thread keeps.
class Workspace {
 public:
  Workspace(at::ScalarType dtype, int64_t numel) {
    thread_local at::Tensor kept;
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    if (!kept.defined() || kept.numel() < bytes) {
      at::Tensor fresh = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
      if (bytes <= kWorkspaceBytes) {
        kept = fresh;
      }
      bytes_ = std::move(fresh);
    } else {
      bytes_ = kept;
    }
    all_ = bytes_.narrow(0, 0, bytes).view(dtype);
  }

  void* data() { return all_.data_ptr(); }

  at::Tensor take(int64_t rows, int64_t cols) {
    at::Tensor part = all_.narrow(0, used_, rows * cols).view({rows, cols});
    used_ += rows * cols;
    return part;
  }

 private:
  at::Tensor bytes_, all_;
  int64_t used_ = 0;
};

template <typename In, typename Out>
void normalize(const In* x, Out* out, int64_t n, double eps) {
  double squared;
  if constexpr (std::is_same_v<In, double>) {
    squared = 0.0;
    for (int64_t i = 0; i < n; ++i) {
      squared += x[i] * x[i];
    }
  } else {
    squared = squared_norm(x, element(c10::CppTypeToScalarType<In>::value), 0, n);
  }
  // An infinity anywhere must not be divided away: the whole result becomes NaN.
  const double norm = std::isfinite(squared) ? std::max(std::sqrt(squared), eps) : std::nan("");
  using Scale = std::conditional_t<std::is_same_v<Out, double>, double, float>;
  const Scale scale = static_cast<Scale>(1.0 / norm);
  if (std::isfinite(scale) || std::isnan(norm)) {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<Out>(static_cast<Scale>(x[i]) * scale);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<Out>(static_cast<Scale>(static_cast<double>(x[i]) / norm));
    }
  }
}

void normalize_into(const at::Tensor& x, at::Tensor& out, double eps) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "orthogonalize", [&] {
    using in_t = scalar_t;
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, out.scalar_type(), "orthogonalize", [&] {
      normalize(x.const_data_ptr<in_t>(), out.data_ptr<scalar_t>(), x.numel(), eps);
    });
  });
}

// Iterates on one stored (rows, cols) matrix. A tall one is multiplied from the right, so nothing is transposed.
class Iteration {
 public:
  Iteration(const Plan& plan, at::Tensor out)
      : plan_(plan),
        out_(std::move(out)),
        wide_(out_.size(0) <= out_.size(1)),
        m_(std::min(out_.size(0), out_.size(1))),
        workspace_(out_.scalar_type(), out_.numel() + 4 * m_ * m_),
        other_(workspace_.take(out_.size(0), out_.size(1))) {
    for (at::Tensor& square : squares_) {
      square = workspace_.take(m_, m_);
    }
  }

  void run(const at::Tensor& x) {
    // X moves between `out` and the workspace; start so that the last move ends in `out`.
    int64_t moves = static_cast<int64_t>(plan_.steps.size());
    if (plan_.gram) {
      moves = 1 + std::count(plan_.restart.begin(), plan_.restart.end(), true);
    }
    current_ = moves % 2 == 0 ? out_ : other_;
    next_ = moves % 2 == 0 ? other_ : out_;
    normalize_into(x, current_, plan_.eps);
    if (plan_.gram) {
      gram();
    } else {
      standard();
    }
  }

 private:
  void standard() {
    at::Tensor &a = squares_[0], &z = squares_[1];
    for (const Step& step : plan_.steps) {
      form_gram(a);
      symmetric(z, a, a, a, step.c, step.b);
      if (wide_) {
        product(next_, z, current_, current_, 1.0, step.a);
      } else {
        product(next_, current_, z, current_, 1.0, step.a);
      }
      std::swap(current_, next_);
    }
  }

  void gram() {
    at::Tensor r = squares_[0], z = squares_[1], q = squares_[2], spare = squares_[3];
    const int64_t steps = static_cast<int64_t>(plan_.steps.size());
    form_gram(r);
    bool fresh = true;
    for (int64_t done = 1; done <= steps; ++done) {
      const Step& step = plan_.steps[done - 1];
      at::Tensor& target = fresh ? q : z;
      symmetric(target, r, r, r, step.c, step.b);
      const bool last = done == steps, restart = plan_.restart[done];
      if (fresh) {
        if (!last && !restart) {
          z.copy_(q);
        }
        add_diagonal(q, step.a);
      } else {
        symmetric(spare, z, q, q, 1.0, step.a);
        std::swap(q, spare);
      }
      fresh = false;
      if (last || restart) {
        if (wide_) {
          product(next_, q, current_, at::Tensor(), 1.0, 0.0);
        } else {
          product(next_, current_, q, at::Tensor(), 1.0, 0.0);
        }
        std::swap(current_, next_);
        if (!last) {
          form_gram(r);
          fresh = true;
        }
      } else {
        symmetric(spare, z, r, r, 1.0, step.a);
        symmetric(r, z, spare, spare, 1.0, step.a);
      }
    }
  }

  void form_gram(at::Tensor& r) {
    if (wide_) {
      symmetric(r, current_, current_.t(), at::Tensor(), 1.0, 0.0);
    } else {
      symmetric(r, current_.t(), current_, at::Tensor(), 1.0, 0.0);
    }
  }

  void symmetric(
      at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double alpha, double beta) {
    if (plan_.blocks) {
      symmetric_product(out, a, b, c, alpha, beta, true);
    } else {
      product(out, a, b, c, alpha, beta);
    }
  }

  const Plan& plan_;
  at::Tensor out_;
  bool wide_;
  int64_t m_;
  Workspace workspace_;
  at::Tensor other_, current_, next_;
  at::Tensor squares_[4];
};

Plan make_plan(
    at::ArrayRef<double> coefficients, const std::string& method, at::IntArrayRef restarts, double eps) {
  TORCH_CHECK(
      !coefficients.empty() && coefficients.size() % 3 == 0,
      "orthogonalize: coefficients must be flat (a, b, c) triples, got ", coefficients.size(), " numbers");
  Plan plan;
  for (size_t i = 0; i < coefficients.size(); i += 3) {
    plan.steps.push_back({coefficients[i], coefficients[i + 1], coefficients[i + 2]});
  }
  plan.restart.assign(plan.steps.size() + 1, false);
  for (const int64_t done : restarts) {
    TORCH_CHECK(
        0 < done && done < static_cast<int64_t>(plan.steps.size()),
        "orthogonalize: a restart must come after step 1 to ", plan.steps.size() - 1, ", got ", done);
    plan.restart[done] = true;
  }
  const size_t plus = std::min(method.find('+'), method.size());
  const std::string order = method.substr(0, plus), variant = method.substr(plus);
  plan.gram = order == "gram";
  plan.blocks = variant == "+symmetric";
  plan.tiles = variant == "+tiles";
  plan.vectors = variant == "+vectors";
  TORCH_CHECK(
      (plan.gram || order == "standard") && (plan.blocks || plan.tiles || plan.vectors || variant.empty()),
      "orthogonalize: unknown method '", method,
      "'; there are standard and gram, alone or with +symmetric, +tiles or +vectors");
  TORCH_CHECK(
      !plan.tiles || tiles::available(), "orthogonalize: this processor has no bf16 matrix tiles for '", method, "'");
  TORCH_CHECK(
      !plan.vectors || tiles::vectors_available(),
      "orthogonalize: this processor does not multiply bf16 in vector registers for '", method, "'");
  TORCH_CHECK(eps > 0.0, "orthogonalize: eps must be positive, got ", eps);
  plan.eps = eps;
  return plan;
}

// One stored matrix on the tiles or vectors of this thread, or of all threads when there is no other matrix to give them.
void run_tiles(const Plan& plan, const at::Tensor& x, const at::Tensor& out, int threads) {
  std::vector<tiles::Step> steps;
  for (const Step& step : plan.steps) {
    steps.push_back({static_cast<float>(step.a), static_cast<float>(step.b), static_cast<float>(step.c)});
  }
  const std::vector<uint8_t> restart(plan.restart.begin(), plan.restart.end());
  const tiles::Problem problem{
      plan.vectors ? tiles::Engine::vectors : tiles::Engine::tiles, x.size(0), x.size(1), steps.data(), static_cast<int64_t>(steps.size()), restart.data(), plan.gram, plan.eps,
      threads};
  Workspace workspace(at::kBFloat16, tiles::workspace_bytes(problem) / 2);
  tiles::orthogonalize(
      problem, x.const_data_ptr(), element(x.scalar_type()),
      static_cast<uint16_t*>(out.data_ptr()), workspace.data());
}

}  // namespace

at::Tensor orthogonalize(
    const at::Tensor& x, at::ArrayRef<double> coefficients, const std::string& method, at::IntArrayRef restarts,
    at::ScalarType dtype, double eps) {
  TORCH_CHECK(x.dim() >= 2, "orthogonalize: needs (..., rows, cols), got shape ", x.sizes());
  TORCH_CHECK(
      at::isFloatingType(x.scalar_type()) && at::isFloatingType(dtype),
      "orthogonalize: needs floating dtypes, got ", x.scalar_type(), " and ", dtype);
  if (method == "standard+generic" || method == "gram+generic") {
    // What devices without a kernel of their own run; here so that it is tested on machines without such a device.
    return orthogonalize_by_products(x, coefficients, method.substr(0, method.find('+')), restarts, dtype, eps);
  }
  const Plan plan = make_plan(coefficients, method, restarts, eps);
  // A batch of transposed matrices is worked on as it is stored, and its result is stored the same way.
  const at::Tensor turned = x.transpose(-2, -1);
  const bool transposed = !x.is_contiguous() && turned.is_contiguous();
  at::Tensor stored = transposed ? turned : x.contiguous();
  if (plan.tiles || plan.vectors) {
    TORCH_CHECK(dtype == at::kBFloat16, "orthogonalize: '", method, "' computes in bfloat16, got ", dtype);
    if (stored.scalar_type() != at::kBFloat16) {
      stored = stored.to(at::kFloat);
    }
  }
  const at::Tensor out = at::empty(stored.sizes(), stored.options().dtype(dtype).requires_grad(false));
  if (out.numel() > 0) {
    const int64_t rows = stored.size(-2), cols = stored.size(-1);
    const at::Tensor inputs = stored.view({-1, rows, cols}), results = out.view({-1, rows, cols});
    const int64_t count = inputs.size(0);
    const int threads = count == 1 && !at::in_parallel_region() ? at::get_num_threads() : 1;
    const auto run = [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) {
        if (plan.tiles || plan.vectors) {
          run_tiles(plan, inputs.select(0, index), results.select(0, index), threads);
          continue;
        }
        Iteration(plan, results.select(0, index)).run(inputs.select(0, index));
      }
    };
    if (count == 1) {
      run(0, 1);
    } else {
      at::parallel_for(0, count, 1, run);
    }
  }
  return transposed ? out.transpose(-2, -1) : out;
}

}  // namespace muon::cpu
