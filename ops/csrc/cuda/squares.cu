// Sums of squares of matrices: one pass for the norms by which the iteration divides.
//
// torch would read a matrix three times and write a copy of it, because small elements have to be enlarged before they are
// squared. Here a warp takes a part of a matrix, with both sums.
#include "elements.cuh"
#include "launch.cuh"

namespace muon {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kStep = 32 * kFlatVector;  // elements that a warp takes at once

__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __uint_as_float(__shfl_xor_sync(0xffffffffu, __float_as_uint(value), distance));
  }
  return value;
}

template <int dtype>
__global__ void __launch_bounds__(kThreads) squares_kernel(const __grid_constant__ MuonSquares p) {
  using X = typename Stored<dtype>::type;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  // Elements of a part, but for the last ones: whole vectors, so that all parts begin alike on the 16-byte grid.
  const int64_t length = (p.numel + p.parts * kFlatVector - 1) / (p.parts * kFlatVector) * kFlatVector;
  for (int64_t part = int64_t{blockIdx.x} * kWarps + warp; part < p.batch * p.parts; part += int64_t{gridDim.x} * kWarps) {
    const int64_t begin = part % p.parts * length;
    const int64_t end = begin + length < p.numel ? begin + length : p.numel;
    const X* const x = static_cast<const X*>(p.x) + part / p.parts * p.numel;
    float plain = 0.0f, enlarged = 0.0f;
    const auto add = [&](float value) {
      plain = fmaf(value, value, plain);
      const float large = value * 0x1p80f;
      enlarged = fmaf(large, large, enlarged);
    };
    if (on_16_bytes(x + begin)) {
#pragma unroll 4
      for (int64_t i = begin + lane * kFlatVector; i + kFlatVector <= end; i += kStep) {
        const Vector v = load_vector(x + i);
#pragma unroll
        for (int k = 0; k < kFlatVector; ++k) add(v.value[k]);
      }
      // What is left is less than a vector.
      const int64_t rest = begin + (end - begin) / kFlatVector * kFlatVector + lane;
      if (rest < end) add(to_float(x[rest]));
    } else {
      for (int64_t i = begin + lane; i < end; i += 32) add(to_float(x[i]));
    }
    plain = sum_of_warp(plain);
    enlarged = sum_of_warp(enlarged);
    if (lane == 0) {
      store_global(p.sums + 2 * part, plain);
      store_global(p.sums + 2 * part + 1, enlarged);
    }
  }
}

}  // namespace
}  // namespace muon

extern "C" int muon_squares(const MuonSquares* problem, muon_stream_t stream) {
  using namespace muon;
  const MuonSquares& p = *problem;
  if (!known_dtype(p.dtype)) return MUON_DTYPE_UNSUPPORTED;
  if (p.batch < 0 || p.numel < 0 || p.parts < 1) return MUON_BAD_ARGUMENT;
  if (p.batch == 0) return MUON_OK;
  for (const int status : {check_array(p.x, p.dtype), check_array(p.sums, MUON_FLOAT32)}) {
    if (status != MUON_OK) return status;
  }
  return with_dtype(p.dtype, [&](auto dtype) {
    const auto kernel = squares_kernel<decltype(dtype)::value>;
    const Prepared ready = prepare(kernel, kThreads, 0);
    if (ready.status != MUON_OK) return ready.status;
    const int64_t blocks = (p.batch * p.parts + kWarps - 1) / kWarps;
    const unsigned grid = static_cast<unsigned>(blocks < ready.blocks ? blocks : ready.blocks);
    kernel<<<grid, kThreads, 0, stream>>>(p);
    return static_cast<int>(cudaGetLastError());
  });
}
