// The passes over flat tensors, on the elements from `begin` to `end` of a fragment in one thread.
#pragma once

#include <cstdint>

#include "../include/code_blocks.h"

namespace muon::cpu {

enum class Element { fp32, bf16, fp16 };

// A flat array of one of these types. All arithmetic is fp32; half formats are rounded to nearest when they are written.
struct Array {
  void* data;
  Element type;
};

// buf <- lerp(buf, grad, 1 - momentum); out <- nesterov ? lerp(grad, buf, momentum) : buf, of buf before it is rounded.
void momentum_pack(
    const Array& buf, const Array& grad, const Array& out, int64_t begin, int64_t end, double momentum, bool nesterov);

// momentum_pack for momentum in 8 bits, on the blocks from `begin` to `end` of a fragment of `numel` elements.
void momentum_pack_int8(
    int8_t* codes, const CodeBlocks& blocks, const Array& grad, const Array& out, int64_t numel, int64_t begin,
    int64_t end, double momentum, bool nesterov);

// param <- decay * param - lr_scale * update.
void unpack_apply(
    const Array& param, const Array& update, int64_t begin, int64_t end, double lr_scale, double decay);

}  // namespace muon::cpu
