// The elementwise passes over fragments of flat arrays, each reading and writing every array once.
//
// momentum_pack moves 14 bytes an element with fp32 state and a 2-byte send buffer, with momentum in 8 bits 8, unpack_apply
// 10: the memory is the limit, so a thread takes eight elements at once with 16-byte accesses, all loads before the first
// use. A block takes one tile of a fragment after the other; the table of the fragments is an argument of the kernel.
#include "../include/code_blocks.h"
#include "elements.cuh"
#include "launch.cuh"

namespace muon {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void store_vector(float* target, const Vector& v) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const four = v.value + 4 * half;
    store_global_16(target + 4 * half, make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                                  __float_as_uint(four[2]), __float_as_uint(four[3])));
  }
}

template <typename T>
__device__ __forceinline__ void store_vector(T* target, const Vector& v) {
  store_global_16(target,
                  make_uint4(Half2<T>::pack(v.value[0], v.value[1]), Half2<T>::pack(v.value[2], v.value[3]),
                             Half2<T>::pack(v.value[4], v.value[5]), Half2<T>::pack(v.value[6], v.value[7])));
}

__device__ __forceinline__ void store_codes(int8_t* target, const int8_t (&codes)[kFlatVector]) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kFlatVector; ++i) words[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(codes[i])) << 8 * (i % 4);
  store_global_8(target, make_uint2(words[0], words[1]));
}

// torch.lerp's two branches: each is exact at the end that it is nearer to.
__device__ __forceinline__ float lerp(float start, float end, float weight) {
  const float distance = end - start;
  return weight < 0.5f ? fmaf(weight, distance, start) : fmaf(weight - 1.0f, distance, end);
}

template <typename T>
__device__ __forceinline__ FlatArray flat_array(const T* pointer) {
  return {reinterpret_cast<uintptr_t>(pointer), static_cast<int>(sizeof(T))};
}

struct PackFragment {
  void* momentum;
  const void* grad;
  void* out;
  int64_t n;
  float gradient;  // 1 - decay
  float blend;     // decay
  int nesterov;

  static PackFragment of(const MuonPackRow& row) {
    return {row.momentum, row.grad, row.out, row.n, static_cast<float>(1.0 - row.decay), static_cast<float>(row.decay),
            row.nesterov};
  }
  int64_t tiles() const { return flat_tiles(n); }
};

// `momentum` are codes. A tile is kTileBlocks of their blocks.
struct CodeFragment : PackFragment {
  CodeBlocks blocks;

  static CodeFragment of(const MuonPackRow& row) {
    return {PackFragment::of(row), {row.scales, row.before}};
  }
  int64_t tiles() const { return flat_tiles(blocks.before + n); }
};
constexpr int kTileBlocks = kFlatTile / kCodeBlock;
static_assert(kFlatTile % kCodeBlock == 0);

struct ApplyFragment {
  void* param;
  const void* update;
  int64_t n;
  float lr_scale;
  float decay;

  static ApplyFragment of(const MuonApplyRow& row) {
    return {row.param, row.update, row.n, static_cast<float>(row.lr_scale), static_cast<float>(row.decay)};
  }
  int64_t tiles() const { return flat_tiles(n); }
};

// What one launch works on: fragment i has the tiles from firsts[i] up to firsts[i + 1], the last one up to `tiles`. As many
// fragments as fit into the 4 KiB of a kernel's arguments.
template <typename Fragment>
struct Fragments {
  static constexpr int kRows = (4096 - 2 * sizeof(int64_t)) / (sizeof(int64_t) + sizeof(Fragment));
  int64_t firsts[kRows];
  Fragment rows[kRows];
  int64_t tiles;
  int count;
};
static_assert(Fragments<PackFragment>::kRows == 72 && Fragments<CodeFragment>::kRows == 56, "muon_cuda.h names them");

// Elements [begin, begin + n) of a fragment.
struct Tile {
  int row;
  int64_t begin;
  int64_t n;
};

template <typename Fragment>
__device__ __forceinline__ Tile tile_of(const Fragments<Fragment>& table, int64_t tile) {
  const int row = fragment_of(table.firsts, table.count, tile);
  const int64_t begin = (tile - table.firsts[row]) * kFlatTile;
  const int64_t left = table.rows[row].n - begin;
  return {row, begin, left < kFlatTile ? left : kFlatTile};
}

__device__ __forceinline__ float momentum_step(float& momentum, float grad, const PackFragment& fragment) {
  momentum = lerp(momentum, grad, fragment.gradient);
  return fragment.nesterov ? lerp(grad, momentum, fragment.blend) : momentum;
}

__device__ __forceinline__ float apply_step(float param, float update, const ApplyFragment& fragment) {
  return fmaf(-fragment.lr_scale, update, fragment.decay * param);
}

// Calls vector(i) for each group of kFlatVector elements of a tile that this thread takes, from element i on, and single(i)
// for each of the others.
template <typename Vectors, typename Singles>
__device__ __forceinline__ void walk(const FlatSplit& split, int64_t n, const Vectors& vector, const Singles& single) {
  for (int64_t i = threadIdx.x; i < split.vectors; i += kThreads) vector(split.head + i * kFlatVector);
  const int64_t singles = split.singles(n);
  for (int64_t i = threadIdx.x; i < singles; i += kThreads) single(split.single(i));
}

template <int momentum_dtype, int grad_dtype, int out_dtype>
__global__ void __launch_bounds__(kThreads)
    momentum_pack_kernel(const __grid_constant__ Fragments<PackFragment> table) {
  using Momentum = typename Stored<momentum_dtype>::type;
  using Grad = typename Stored<grad_dtype>::type;
  using Out = typename Stored<out_dtype>::type;
  for (int64_t number = blockIdx.x; number < table.tiles; number += gridDim.x) {
    const Tile tile = tile_of(table, number);
    const PackFragment& fragment = table.rows[tile.row];
    Momentum* __restrict__ const momentum = static_cast<Momentum*>(fragment.momentum) + tile.begin;
    const Grad* __restrict__ const grad = static_cast<const Grad*>(fragment.grad) + tile.begin;
    Out* __restrict__ const out = static_cast<Out*>(fragment.out) + tile.begin;
    const FlatSplit split = flat_split(flat_array(momentum), flat_array(grad), flat_array(out), tile.n);
    const auto vector = [&](int64_t at) {
      Vector m = load_vector(momentum + at);
      const Vector g = load_vector(grad + at);
      Vector direction;
#pragma unroll
      for (int i = 0; i < kFlatVector; ++i) direction.value[i] = momentum_step(m.value[i], g.value[i], fragment);
      store_vector(momentum + at, m);
      store_vector(out + at, direction);
    };
    const auto single = [&](int64_t at) {
      float m = to_float(momentum[at]);
      const float direction = momentum_step(m, to_float(grad[at]), fragment);
      momentum[at] = from_float<Momentum>(m);
      out[at] = from_float<Out>(direction);
    };
    walk(split, tile.n, vector, single);
  }
}

template <int param_dtype, int update_dtype>
__global__ void __launch_bounds__(kThreads)
    unpack_apply_kernel(const __grid_constant__ Fragments<ApplyFragment> table) {
  using Param = typename Stored<param_dtype>::type;
  using Update = typename Stored<update_dtype>::type;
  for (int64_t number = blockIdx.x; number < table.tiles; number += gridDim.x) {
    const Tile tile = tile_of(table, number);
    const ApplyFragment& fragment = table.rows[tile.row];
    Param* __restrict__ const param = static_cast<Param*>(fragment.param) + tile.begin;
    const Update* __restrict__ const update = static_cast<const Update*>(fragment.update) + tile.begin;
    const FlatSplit split = flat_split(flat_array(param), flat_array(param), flat_array(update), tile.n);
    const auto vector = [&](int64_t at) {
      Vector p = load_vector(param + at);
      const Vector u = load_vector(update + at);
#pragma unroll
      for (int i = 0; i < kFlatVector; ++i) p.value[i] = apply_step(p.value[i], u.value[i], fragment);
      store_vector(param + at, p);
    };
    const auto single = [&](int64_t at) {
      param[at] = from_float<Param>(apply_step(to_float(param[at]), to_float(update[at]), fragment));
    };
    walk(split, tile.n, vector, single);
  }
}

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, value, distance);
    value = value < other ? other : value;
  }
  return value;
}

// `n` elements of momentum in 8 bits from `begin` on, which are in one block, by one warp. Each thread takes eight of them:
// in vectors if the block is whole and lies on the grids of all accesses.
template <bool vectors, typename Grad, typename Out>
__device__ __forceinline__ void pack_block(const CodeFragment& fragment, int64_t block, int64_t begin, int n) {
  static_assert(kCodeBlock == 32 * kFlatVector);
  const int lane = static_cast<int>(threadIdx.x % 32), first = vectors ? kFlatVector * lane : lane;
  int8_t* const codes = static_cast<int8_t*>(fragment.momentum) + begin + first;
  const Grad* const grad = static_cast<const Grad*>(fragment.grad) + begin + first;
  Out* const out = static_cast<Out*>(fragment.out) + begin + first;
  const float old = fragment.blocks.scales[block];
  Vector m{}, g{}, direction;
  if constexpr (vectors) {
    m = load_vector(codes);
    g = load_vector(grad);
  } else {
#pragma unroll
    for (int i = 0; i < kFlatVector; ++i) {
      if (first + 32 * i >= n) continue;
      m.value[i] = static_cast<float>(codes[32 * i]);
      g.value[i] = to_float(grad[32 * i]);
    }
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kFlatVector; ++i) {
    float& momentum = m.value[i];
    momentum = __fmul_rn(momentum, old);
    direction.value[i] = momentum_step(momentum, g.value[i], fragment);
    const uint32_t magnitude = __float_as_uint(momentum) & 0x7fffffffu;
    largest = largest < magnitude ? magnitude : largest;
  }
  if constexpr (vectors) {
    store_vector(out, direction);
  } else {
#pragma unroll
    for (int i = 0; i < kFlatVector; ++i) {
      if (first + 32 * i < n) out[32 * i] = from_float<Out>(direction.value[i]);
    }
  }
  largest = largest_of_warp(largest);  // All lanes have read the old scale.
  const float scale = code_scale(largest);
  if (lane == 0) fragment.blocks.scales[block] = scale;
  const bool coded = has_codes(scale);
  const float inverse = 1.0f / scale;
  int8_t found[kFlatVector];
#pragma unroll
  for (int i = 0; i < kFlatVector; ++i) found[i] = coded ? code_of(__fmul_rn(m.value[i], inverse)) : int8_t{0};
  if constexpr (vectors) {
    store_codes(codes, found);
  } else {
#pragma unroll
    for (int i = 0; i < kFlatVector; ++i) {
      if (first + 32 * i < n) codes[32 * i] = found[i];
    }
  }
}

template <int grad_dtype, int out_dtype>
__global__ void __launch_bounds__(kThreads, 4)
    momentum_pack_int8_kernel(const __grid_constant__ Fragments<CodeFragment> table) {
  using Grad = typename Stored<grad_dtype>::type;
  using Out = typename Stored<out_dtype>::type;
  for (int64_t number = blockIdx.x; number < table.tiles; number += gridDim.x) {
    const int row = fragment_of(table.firsts, table.count, number);
    const CodeFragment& fragment = table.rows[row];
    const int64_t first = (number - table.firsts[row]) * kTileBlocks;
    const int64_t count = fragment.blocks.count(fragment.n);
    const int64_t last = first + kTileBlocks < count ? first + kTileBlocks : count;
    for (int64_t block = first + threadIdx.x / 32; block < last; block += kThreads / 32) {
      const int64_t begin = fragment.blocks.begin(block);
      const int n = static_cast<int>(fragment.blocks.end(block, fragment.n) - begin);
      const uintptr_t codes = reinterpret_cast<uintptr_t>(fragment.momentum) + static_cast<uintptr_t>(begin);
      if (n == kCodeBlock && codes % kFlatVector == 0 && on_16_bytes(static_cast<const Grad*>(fragment.grad) + begin) &&
          on_16_bytes(static_cast<const Out*>(fragment.out) + begin)) {
        pack_block<true, Grad, Out>(fragment, block, begin, n);
      } else {
        pack_block<false, Grad, Out>(fragment, block, begin, n);
      }
    }
  }
}

// Launches `kernel` as often as the fragments need, with no more blocks than the device holds at once.
template <typename Fragment, typename Row>
int launch_fragments(void (*kernel)(Fragments<Fragment>), const Row* rows, int64_t count, cudaStream_t stream) {
  const Prepared ready = prepare(kernel, kThreads, 0);
  if (ready.status != MUON_OK) return ready.status;
  for (int64_t next = 0; next < count;) {
    Fragments<Fragment> table{};
    for (; next < count && table.count < table.kRows; ++next) {
      if (rows[next].n == 0) continue;
      table.firsts[table.count] = table.tiles;
      table.rows[table.count] = Fragment::of(rows[next]);
      table.tiles += table.rows[table.count].tiles();
      table.count += 1;
    }
    if (table.count == 0) return MUON_OK;
    const int grid = static_cast<int>(table.tiles < ready.blocks ? table.tiles : ready.blocks);
    kernel<<<grid, kThreads, 0, stream>>>(table);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return MUON_OK;
}

// Whether there are `count` rows, each with no elements or with arrays that `arrays_of` accepts.
template <typename Row, typename Check>
int check_rows(const Row* rows, int64_t count, const Check& arrays_of) {
  if (count < 0 || (count > 0 && rows == nullptr)) return MUON_BAD_ARGUMENT;
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i].n < 0) return MUON_BAD_ARGUMENT;
    const int status = rows[i].n == 0 ? MUON_OK : arrays_of(rows[i]);
    if (status != MUON_OK) return status;
  }
  return MUON_OK;
}

}  // namespace
}  // namespace muon

extern "C" int muon_momentum_pack(const MuonPackRow* rows, int64_t count, int32_t momentum_dtype, int32_t grad_dtype,
                                  int32_t out_dtype, muon_stream_t stream) {
  using namespace muon;
  const bool coded = momentum_dtype == MUON_INT8;
  if (!(coded || known_dtype(momentum_dtype)) || !known_dtype(grad_dtype) || !known_dtype(out_dtype)) {
    return MUON_DTYPE_UNSUPPORTED;
  }
  const int status = check_rows(rows, count, [&](const MuonPackRow& row) {
    const int first = check_array(row.momentum, momentum_dtype), second = check_array(row.grad, grad_dtype);
    if (first != MUON_OK || second != MUON_OK) return first != MUON_OK ? first : second;
    if (coded && (row.before < 0 || row.before >= kCodeBlock)) return static_cast<int>(MUON_BAD_ARGUMENT);
    const int third = coded ? check_array(row.scales, MUON_FLOAT32) : MUON_OK;
    return third != MUON_OK ? third : check_array(row.out, out_dtype);
  });
  if (status != MUON_OK || count == 0) return status;
  return with_dtype(grad_dtype, [&](auto grad) {
    return with_dtype(out_dtype, [&](auto out) {
      constexpr int g = decltype(grad)::value, o = decltype(out)::value;
      if (coded) return launch_fragments<CodeFragment>(momentum_pack_int8_kernel<g, o>, rows, count, stream);
      return with_dtype(momentum_dtype, [&](auto momentum) {
        const auto kernel = momentum_pack_kernel<decltype(momentum)::value, g, o>;
        return launch_fragments<PackFragment>(kernel, rows, count, stream);
      });
    });
  });
}

extern "C" int muon_unpack_apply(const MuonApplyRow* rows, int64_t count, int32_t param_dtype, int32_t update_dtype,
                                 muon_stream_t stream) {
  using namespace muon;
  if (!known_dtype(param_dtype) || !known_dtype(update_dtype)) return MUON_DTYPE_UNSUPPORTED;
  const int status = check_rows(rows, count, [&](const MuonApplyRow& row) {
    const int first = check_array(row.param, param_dtype);
    return first != MUON_OK ? first : check_array(row.update, update_dtype);
  });
  if (status != MUON_OK || count == 0) return status;
  return with_dtype(param_dtype, [&](auto param) {
    return with_dtype(update_dtype, [&](auto update) {
      const auto kernel = unpack_apply_kernel<decltype(param)::value, decltype(update)::value>;
      return launch_fragments<ApplyFragment>(kernel, rows, count, stream);
    });
  });
}
