// The Newton-Schulz iteration in bf16 on a CPU's matrix tiles (AMX) or its vector registers (AVX512-BF16): products that
// compute half of a symmetric result, with scaling, addition and mirroring done on the fp32 sums before they are
// rounded once.
#pragma once

#include <cstdint>

#include "flat.h"

namespace muon::cpu::tiles {

struct Step {
  float a, b, c;
};

enum class Engine { tiles, vectors };

struct Problem {
  Engine engine;
  int64_t rows, cols;
  const Step* steps;
  int64_t count;            // of steps
  const uint8_t* restart;   // restart[done] != 0: form X again after `done` completed steps; count + 1 entries
  bool gram;
  double eps;               // lower bound of the Frobenius norm
  int threads;              // that one matrix may use
};

// Whether this processor has bf16 tiles and the kernel lets this process use them. Asks once.
bool available();

// Whether this processor multiplies bf16 in its 512-bit registers. Asks once.
bool vectors_available();

// Bytes that `orthogonalize` needs, 64-byte aligned.
int64_t workspace_bytes(const Problem& problem);

// x and out are (rows, cols), row-major without gaps; x is fp32 or bf16, out is bf16. They must not overlap.
void orthogonalize(const Problem& problem, const void* x, Element type, uint16_t* out, void* workspace);

}  // namespace muon::cpu::tiles
