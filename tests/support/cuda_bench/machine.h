// A machine that runs CUDA kernels on a CPU, one block or one cluster at a time, its threads as fibres in a random order.
//
// What the kernels of this project ask of the hardware, and no more: shared memory, barriers, asynchronous copies, and
// the tensor core's products. Whatever is asynchronous ends early or late, as the mode says. Every mistake that hardware
// would answer with a wrong number in silence ends the launch with a message here: an address outside of shared memory, a
// barrier that too many arrive at or that the copy engine was not told of, an access to global memory outside of the
// operands or off its 16 bytes, more shared memory or registers than a block was given, lanes of a warp that disagree,
// copies in flight at the end, and a word of shared memory that one thread writes and another one reads, or writes,
// without a barrier in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct CUtensorMap_st;

namespace bench {

struct Dim {
  unsigned x;
};
extern Dim thread_index, block_index, grid_size;

// Ends the launch of the thread that calls it.
[[noreturn]] void fail(const char* what);

// `cluster` blocks run at the same time and reach each other's shared memory. `handle` is the kernel, whose limit of shared
// memory allow_shared raises.
void launch(unsigned char* shared, unsigned grid, unsigned threads, size_t bytes, const std::function<void()>& kernel,
            unsigned cluster, const void* handle);
void allow_shared(const void* handle, size_t bytes);

// Checks an access of 16 bytes or fewer to global memory, or to a thread's own: its alignment, and whether it lies in an
// operand, where bench_operand has named them.
void touch(const void* address, int bytes, bool written);

// Shared addresses are offsets from a base that is not 0, so that a null pointer is no address.
uint32_t shared_address(const void* pointer);
void load_shared(uint32_t address, void* value, int bytes);
void store_shared(uint32_t address, const void* value, int bytes);
void load_matrices(uint32_t (&value)[4], uint32_t address, bool transposed);

void copy_async(uint32_t target, const void* source, bool valid);
void copy_commit();
void copy_wait(int pending);

// The value of the lane whose number differs in the bits of `distance`.
uint32_t exchange(uint32_t value, int distance);

// `count` threads of the block meet at barrier `id`; 0 for all of them.
void barrier_sync(int id, int count);

// d += a b^T of one warp: 16 x 8 elements, 16 of k.
void multiply_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool half);

// Hopper.
void phase_init(uint32_t barrier, uint32_t arrivals);
// Makes the barriers that this thread has initialised known to the copy engine and to the other blocks of the cluster.
void phase_init_fence();
void phase_arrive(uint32_t barrier, uint32_t bytes);
void phase_wait(uint32_t barrier, uint32_t parity);
// To all blocks of the cluster whose bit is set in `blocks`, at the same place; 0 for the own one.
void copy_box(uint32_t target, const CUtensorMap_st* map, uint32_t barrier, int x, int y, int z, unsigned blocks = 0);
unsigned cluster_rank();
void cluster_sync();
uint32_t address_in_block(uint32_t address, unsigned rank);
// setmaxnreg: by all four warps of a warpgroup, out of what the block got at its launch.
void set_registers(int count, bool more);
void group_fence();
void group_commit();
void group_wait(int pending);
void group_multiply(float* d, uint64_t a, uint64_t b, bool half, int columns);

template <unsigned cluster = 1, typename Kernel, typename... Arguments>
void start(unsigned char* shared, unsigned grid, unsigned threads, size_t bytes, Kernel kernel, Arguments... arguments) {
  launch(shared, grid, threads, bytes, [=] { kernel(arguments...); }, cluster, reinterpret_cast<const void*>(kernel));
}

}  // namespace bench
