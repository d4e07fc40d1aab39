// The passes over flat tensors, on the elements from `begin` to `end` in one thread.
#pragma once

#include <cstdint>

namespace muon::cpu {

enum class Element { fp32, bf16, fp16 };

// buf <- lerp(buf, grad, 1 - momentum); out <- nesterov ? lerp(grad, buf, momentum) : buf, rounded to `type`.
void momentum_pack(
    float* buf, const float* grad, void* out, Element type, int64_t begin, int64_t end, double momentum, bool nesterov);

// param <- decay * param - lr_scale * update.
void unpack_apply(
    float* param, const void* update, Element type, int64_t begin, int64_t end, double lr_scale, double decay);

// Sum of squares, in fp32 within blocks and in fp64 over them; in fp64 throughout where squares leave fp32's range.
double squared_norm(const void* x, Element type, int64_t begin, int64_t end);

}  // namespace muon::cpu
