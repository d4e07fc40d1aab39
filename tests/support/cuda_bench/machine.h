// A machine that runs CUDA kernels on a CPU, one block at a time, blocks and their threads (fibres) in a random order.
//
// What the kernels of this project ask of the hardware, and no more: shared memory, barriers, asynchronous copies, and
// the tensor core's products. Whatever is asynchronous ends early or late, as the mode says. Every mistake that hardware
// would answer with a wrong number in silence ends the launch with a message here: an address outside of shared memory, a
// barrier that too many arrive at or that the copy engine was not told of, an access to global memory outside of the
// operands or off its 16 bytes, more shared memory than a block was given, lanes of a warp that disagree,
// copies in flight at the end, and a word of shared memory that one thread writes and another one reads, or writes,
// without a barrier in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct CUtensorMap_st;
struct CUstream_st;

namespace bench {

struct Dim {
  unsigned x;
};
extern Dim thread_index, block_index, grid_size;

// Ends the launch of the thread that calls it.
[[noreturn]] void fail(const char* what);

// `stream` is null or that of a device, see c10/cuda/CUDAStream.h. `handle` is the kernel, whose limit of shared memory
// allow_shared raises.
void launch(unsigned char* shared, unsigned grid, unsigned threads, size_t bytes, CUstream_st* stream,
            const std::function<void()>& kernel, const void* handle);
void allow_shared(const void* handle, size_t bytes);

// Checks an access of 16 bytes or fewer to global memory, or to a thread's own: its alignment, and whether it lies in an
// operand, where bench_operand has named them.
void touch(const void* address, int bytes, bool written);

// atomicInc, as if blocks that come later had counted in between: they get these numbers then.
uint32_t count(uint32_t* counter, uint32_t most);

// Shared addresses are offsets from a base that is not 0, so that a null pointer is no address.
uint32_t shared_address(const void* pointer);
void load_shared(uint32_t address, void* value, int bytes);
void store_shared(uint32_t address, const void* value, int bytes);
void load_matrices(uint32_t (&value)[4], uint32_t address);  // transposed

void copy_async(uint32_t target, const void* source, bool valid);
void copy_commit();
void copy_wait(int pending);

// The value of the lane whose number differs in the bits of `distance`.
uint32_t exchange(uint32_t value, int distance);

// `count` threads of the block meet at barrier `id`; 0 for all of them.
void barrier_sync(int id, int count);

// Hopper.
void phase_init(uint32_t barrier, uint32_t arrivals);
// Makes the barriers that this thread has initialised known to the copy engine.
void phase_init_fence();
void phase_arrive(uint32_t barrier, uint32_t bytes);
void phase_wait(uint32_t barrier, uint32_t parity);
void copy_box(uint32_t target, const CUtensorMap_st* map, uint32_t barrier, int x, int y, int z);
void group_fence();
void group_commit();
void group_wait(int pending);
// d += a b^T of one warp of a warpgroup: its 16 of 64 rows, 128 columns, 16 of k.
void group_multiply(float* d, uint64_t a, uint64_t b, bool half);

template <typename Kernel, typename... Arguments>
void start(unsigned char* shared, unsigned grid, unsigned threads, size_t bytes, CUstream_st* stream, Kernel kernel,
           Arguments... arguments) {
  launch(shared, grid, threads, bytes, stream, [=] { kernel(arguments...); }, reinterpret_cast<const void*>(kernel));
}

}  // namespace bench
