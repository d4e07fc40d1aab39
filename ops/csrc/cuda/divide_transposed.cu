// Turns, normalises and casts tall matrices in one pass: the products of the iteration want the short side first.
//
// A block takes one square of 32 x 32 elements after the other through shared memory, so that a warp reads 32 neighbours of
// a row of x and writes 32 neighbours of a row of the result. The pitch of 33 keeps both free of bank conflicts.
#include "elements.cuh"
#include "launch.cuh"

namespace muon {
namespace {

constexpr int kSide = 32, kPitch = kSide + 1;
constexpr int kThreads = 256, kWarps = kThreads / kSide, kRounds = kSide / kWarps;
constexpr int kSharedBytes = kSide * kPitch * sizeof(float);

MUON_HOST_DEVICE int64_t sides(int64_t n) { return (n + kSide - 1) / kSide; }

template <int x_dtype, int out_dtype>
__global__ void __launch_bounds__(kThreads)
    divide_transposed_kernel(const __grid_constant__ MuonDivideTransposed p, uint32_t squares) {
  using X = typename Stored<x_dtype>::type;
  using Out = typename Stored<out_dtype>::type;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t square = shared_address(shared);
  const int lane = static_cast<int>(threadIdx.x % kSide), warp = static_cast<int>(threadIdx.x / kSide);
  const uint32_t down = static_cast<uint32_t>(sides(p.rows)), of_matrix = down * static_cast<uint32_t>(sides(p.cols));
  for (uint32_t number = blockIdx.x; number < squares; number += gridDim.x) {
    const uint32_t matrix = number / of_matrix, within = number % of_matrix;
    const int64_t first_row = int64_t{within % down} * kSide, first_col = int64_t{within / down} * kSide;
    const float norm = p.norms[matrix];
    const int64_t first = first_row + warp, col = first_col + lane;
    const int64_t from = matrix * p.stride_matrix + first * p.stride_row + col * p.stride_col;
    float value[kRounds];  // All loads before the first use.
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const X* const element = static_cast<const X*>(p.x) + from + kWarps * i * p.stride_row;
      value[i] = first + kWarps * i < p.rows && col < p.cols ? to_float(__ldg(element)) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      store_shared_4(square + 4 * ((warp + kWarps * i) * kPitch + lane), __float_as_uint(value[i] / norm));
    }
    __syncthreads();
    const int64_t row = first_row + lane, start = first_col + warp;
    const int64_t to = (matrix * p.cols + start) * p.rows + row;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (row >= p.rows || start + kWarps * i >= p.cols) continue;
      const float quotient = __uint_as_float(load_shared_4(square + 4 * (lane * kPitch + warp + kWarps * i)));
      store_global(static_cast<Out*>(p.out) + to + kWarps * i * p.rows, from_float<Out>(quotient));
    }
    __syncthreads();  // Before the next square overwrites this one.
  }
}

}  // namespace
}  // namespace muon

extern "C" int muon_divide_transposed(const MuonDivideTransposed* problem, muon_stream_t stream) {
  using namespace muon;
  const MuonDivideTransposed& p = *problem;
  if (!known_dtype(p.x_dtype) || !known_dtype(p.out_dtype)) return MUON_DTYPE_UNSUPPORTED;
  if (p.batch < 0 || p.rows < 0 || p.cols < 0) return MUON_BAD_ARGUMENT;
  if (p.batch == 0 || p.rows == 0 || p.cols == 0) return MUON_OK;
  // Squares are counted in 32 bits, which divide faster.
  const int64_t most = (int64_t{1} << 31) - 1;
  if (sides(p.rows) > most / sides(p.cols) / p.batch) return MUON_SHAPE_UNSUPPORTED;
  for (const int status : {check_array(p.x, p.x_dtype), check_array(p.norms, MUON_FLOAT32), check_array(p.out, p.out_dtype)}) {
    if (status != MUON_OK) return status;
  }
  const uint32_t squares = static_cast<uint32_t>(p.batch * sides(p.rows) * sides(p.cols));
  return with_dtype(p.x_dtype, [&](auto x) {
    return with_dtype(p.out_dtype, [&](auto out) {
      const auto kernel = divide_transposed_kernel<decltype(x)::value, decltype(out)::value>;
      const Prepared ready = prepare(kernel, kThreads, kSharedBytes);
      if (ready.status != MUON_OK) return ready.status;
      const unsigned grid = squares < static_cast<unsigned>(ready.blocks) ? squares : ready.blocks;
      kernel<<<grid, kThreads, kSharedBytes, stream>>>(p, squares);
      return static_cast<int>(cudaGetLastError());
    });
  });
}
