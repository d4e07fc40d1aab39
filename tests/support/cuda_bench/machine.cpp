#include "machine.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#ifndef __x86_64__
#error "the fibres are written for x86-64"
#endif

namespace bench {

Dim thread_index, block_index, grid_size;

namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024;
// Where shared memory starts: not on the 1024 bytes that Hopper's ring needs, so that a kernel must round up.
constexpr uint32_t kSharedBase = 16;
constexpr uint32_t kSharedMost = 256 * 1024;
// Shared memory that a kernel may have without asking.
constexpr size_t kSharedLimit = 48 * 1024;

// When asynchronous work ends: at any time, only when somebody waits for it, or as soon as possible.
enum Mode { kAnyTime = 0, kLate = 1, kEarly = 2 };

struct Settings {
  int processors = 4;
  int major = 9;
  int mode = kAnyTime;
  uint64_t seed = 1;
  int second_major = 9;  // of the second device
  // Of each launch only `blocks` blocks run, from this one on.
  uint64_t first_block = 0;
  uint64_t blocks = UINT64_MAX;
} settings;

int current_device = 0;

std::string error;
std::mt19937_64 generator;

uint32_t random_below(uint32_t n) { return static_cast<uint32_t>(generator() % n); }
bool sometimes(uint32_t one_in) { return random_below(one_in) == 0; }

// ---- fibres -----------------------------------------------------------------------------------------------------

struct Fibre {
  void* stack_pointer = nullptr;
  bool done = false;
  std::function<bool()> ready;  // empty: it can go on
};

std::vector<Fibre> fibres;
std::vector<unsigned char*> stacks;
void* scheduler = nullptr;
int current = -1;
bool failed = false;
const std::function<void()>* body = nullptr;
std::map<const void*, size_t> shared_limits;  // of kernels that may have more shared memory than others

void end_launch(const char* what) {
  if (error.empty()) {
    error = std::string(what) + " (block " + std::to_string(block_index.x) + ", thread " + std::to_string(current) + ")";
  }
  failed = true;
}

extern "C" void bench_switch(void** from, void* to);
asm(R"(
.globl bench_switch
bench_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

void leave() { bench_switch(&fibres[current].stack_pointer, scheduler); }

void wait_until(std::function<bool()> ready) {
  // Who could go on at once still lets others run now and then.
  if (ready() && !sometimes(8)) return;
  fibres[current].ready = std::move(ready);
  leave();
}

void let_others_run(uint32_t one_in) {
  if (sometimes(one_in)) leave();
}

void fibre_main() {
  (*body)();
  fibres[current].done = true;
  leave();
}

void prepare_fibre(Fibre& fibre, unsigned char* stack) {
  // As bench_switch leaves it: six registers and the address to return to, on 16 bytes when the function begins.
  auto* top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + kStackBytes) & ~uintptr_t{63});
  *--top = 0;
  *--top = reinterpret_cast<uintptr_t>(&fibre_main);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fibre = Fibre{};
  fibre.stack_pointer = top;
}

// ---- what each thread knows of the others, and races --------------------------------------------------------------

// A thread's time goes on at every barrier. seen[t][u] is the time up to which t has seen what u did.
using Times = std::vector<uint32_t>;
std::vector<Times> seen;
Times now;

void join(Times& into, const Times& from) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

struct Word {
  int writer = -1;
  uint32_t written = 0;
  std::vector<std::pair<int, uint32_t>> readers;  // since then
};
std::vector<Word> words;

bool knows(int thread, int other, uint32_t time) { return thread == other || time <= seen[thread][other]; }

void note_read(uint32_t address, int bytes) {
  for (uint32_t at = (address - kSharedBase) / 4; at < (address - kSharedBase + bytes + 3) / 4; ++at) {
    Word& word = words[at];
    if (word.writer >= 0 && !knows(current, word.writer, word.written)) fail("race: a read of what another thread writes");
    const auto mine = std::find_if(word.readers.begin(), word.readers.end(), [](auto& r) { return r.first == current; });
    if (mine == word.readers.end()) {
      word.readers.emplace_back(current, now[current]);
    } else {
      mine->second = now[current];
    }
  }
}

void note_write(uint32_t address, int bytes) {
  for (uint32_t at = (address - kSharedBase) / 4; at < (address - kSharedBase + bytes + 3) / 4; ++at) {
    Word& word = words[at];
    if (word.writer >= 0 && !knows(current, word.writer, word.written)) fail("race: two threads write");
    for (const auto& [reader, time] : word.readers) {
      if (!knows(current, reader, time)) fail("race: a write of what another thread reads");
    }
    word.readers.clear();
    word.writer = current;
    word.written = now[current];
  }
}

// ---- global memory ------------------------------------------------------------------------------------------------

// What a launch may read or write of one tensor: `sizes` bytes, rows and matrices, `strides` bytes from row to row and
// from matrix to matrix.
struct Operand {
  const unsigned char* base;
  int64_t sizes[3];
  int64_t strides[2];
  bool read, written;
};
std::vector<Operand> operands;

bool inside(const Operand& operand, const void* address, int bytes) {
  int64_t offset = static_cast<const unsigned char*>(address) - operand.base;
  if (offset < 0) return false;
  for (int i = 1; i >= 0; --i) {
    const int64_t place = operand.strides[i] ? offset / operand.strides[i] : 0;
    if (place >= operand.sizes[i + 1]) return false;
    offset -= place * operand.strides[i];
  }
  return offset + bytes <= operand.sizes[0];
}

bool in_an_operand(const void* address, int bytes, bool written) {
  if (operands.empty()) return true;
  return std::any_of(operands.begin(), operands.end(), [&](const Operand& each) {
    return (written ? each.written : each.read) && inside(each, address, bytes);
  });
}

constexpr char kOutside[] = "an access to global memory outside of the operands";

// Of the counter of a launch: numbers that are left to later blocks, whether it is back at 0, and whether no block comes
// later; and the first number that this block can get, because its own ones grow.
std::set<uint32_t> left_numbers;
bool wrapped, last_block;
uint32_t next_number;

// ---- shared memory ------------------------------------------------------------------------------------------------

unsigned char* shared_memory = nullptr;
size_t shared_bytes = 0;

unsigned char* at(uint32_t address, uint32_t bytes) {
  if (address < kSharedBase || address + bytes > kSharedBase + shared_bytes) fail("an address outside of shared memory");
  return shared_memory + (address - kSharedBase);
}

float to_float(uint16_t bits, bool half) {
  if (!half) return __bfloat162float({bits});
  __half value;
  std::memcpy(&value, &bits, sizeof bits);
  return __half2float(value);
}

// ---- warps --------------------------------------------------------------------------------------------------------

struct Product {  // wgmma of one warp
  float* d[kWarp];
  uint64_t a, b;
  bool half;
  int rows;  // the first of its 16
  int group;
};

struct Warp {
  const char* operation = nullptr;
  int arrived = 0;
  uint64_t generation = 0;
  void* arguments[kWarp] = {};
  uint64_t descriptors[2] = {};
  std::deque<Product> products;
  int group = 0;
  bool fenced = false;  // since its threads could last touch the accumulators
};
std::vector<Warp> warps;

// All lanes of a warp come here; the last one carries the operation out for all of them.
template <typename Execute>
void together(const char* operation, void* argument, Execute execute) {
  Warp& warp = warps[current / kWarp];
  if (warp.arrived == 0) warp.operation = operation;
  if (warp.operation != operation) fail("lanes of a warp are at different operations");
  warp.arguments[current % kWarp] = argument;
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    ++warp.generation;
    execute(warp);
    return;
  }
  wait_until([&warp, before = warp.generation] { return warp.generation != before; });
}

// ---- asynchronous copies ------------------------------------------------------------------------------------------

struct Copy {
  uint32_t target;
  const void* source;
  bool valid;
  int group;
};
struct Copies {
  std::deque<Copy> pending;
  int group = 0;
};
std::vector<Copies> copies;  // of each thread

void carry_out(const Copy& copy) {
  if (copy.valid) {
    std::memcpy(at(copy.target, 16), copy.source, 16);
  } else {
    std::memset(at(copy.target, 16), 0, 16);
  }
}

// ---- barriers -----------------------------------------------------------------------------------------------------

struct Meeting {
  int count = 0;
  std::vector<int> present;
  uint64_t generation = 0;
};
std::map<int, Meeting> meetings;

struct Phase {
  int arrivals = 0;
  int missing = 0;
  int64_t bytes = 0;
  uint32_t parity = 0;
  Times known;
  // Who initialised it, when, and whether a fence has told the copy engine.
  int maker = -1;
  uint32_t made = 0;
  bool fenced = false;

  void settle() {
    if (missing != 0 || bytes != 0) return;
    parity ^= 1u;
    missing = arrivals;
  }
};
std::map<uint32_t, Phase> phases;

Phase& phase_at(uint32_t barrier) {
  const auto found = phases.find(barrier);
  if (found == phases.end()) fail("a barrier that was not initialised");
  Phase& phase = found->second;
  if (current >= 0 && !knows(current, phase.maker, phase.made)) fail("a barrier whose initialisation a thread has not seen");
  return phase;
}

// ---- the copy engine ----------------------------------------------------------------------------------------------

constexpr uint32_t kMagic = 0x4d41504d;

struct TensorMap {
  uint32_t magic;
  uint32_t box[3];
  uint64_t sizes[3];
  uint64_t strides[2];
  const unsigned char* base;
};
struct BoxCopy {
  TensorMap map;
  uint32_t target, barrier;
  int64_t from[3];
};
std::vector<BoxCopy> box_copies;

uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7u) << 4); }

void carry_out(const BoxCopy& copy) {
  const TensorMap& map = copy.map;
  uint32_t offset = 0;
  const int64_t within = std::clamp<int64_t>(static_cast<int64_t>(map.sizes[0]) - copy.from[0], 0, map.box[0]);
  for (uint32_t z = 0; z < map.box[2]; ++z) {
    for (uint32_t y = 0; y < map.box[1]; ++y) {
      const uint64_t row[2] = {uint64_t(copy.from[1] + y), uint64_t(copy.from[2] + z)};
      const auto* const source = map.base + 2 * copy.from[0] + map.strides[0] * row[0] + map.strides[1] * row[1];
      const bool exists = row[0] < map.sizes[1] && row[1] < map.sizes[2];
      if (exists && within && !in_an_operand(source, static_cast<int>(2 * within), false)) return end_launch(kOutside);
      for (uint32_t x = 0; x < map.box[0]; ++x, offset += 2) {
        uint16_t value = 0;  // outside of the tensor; a negative coordinate is a very large one
        if (exists && uint64_t(copy.from[0] + x) < map.sizes[0]) std::memcpy(&value, source + 2 * x, 2);
        std::memcpy(at(swizzled(copy.target + offset), 2), &value, 2);
      }
    }
  }
  Phase& phase = phase_at(copy.barrier);
  phase.bytes -= offset;
  phase.settle();
}

// ---- wgmma --------------------------------------------------------------------------------------------------------

// Reads `count` rows of 16 elements of k by a descriptor: K-major, 8 rows of 128 bytes after each other, swizzled.
void read_operand(float (*out)[16], int first, int count, uint64_t descriptor, bool half) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const uint32_t stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) fail("a descriptor without the swizzle of 128 bytes");
  for (int row = first; row < first + count; ++row) {
    for (int k = 0; k < 16; ++k) {
      uint16_t bits;
      std::memcpy(&bits, at(swizzled(start + row / 8 * stride + row % 8 * 128 + 2 * k), 2), 2);
      out[row - first][k] = to_float(bits, half);
    }
  }
}

constexpr int kColumns = 128;

void carry_out(const Product& product) {
  static float a[16][16], b[kColumns][16], b_turned[16][kColumns], sums[16][kColumns];
  read_operand(a, product.rows, 16, product.a, product.half);
  read_operand(b, 0, kColumns, product.b, product.half);
  for (int n = 0; n < kColumns; ++n) {
    for (int k = 0; k < 16; ++k) b_turned[k][n] = b[n][k];
  }
  const auto each = [&](auto visit) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int j = 0; j < kColumns / 8; ++j) {
        for (int e = 0; e < 4; ++e) {
          visit(product.d[lane][4 * j + e], sums[lane / 4 + 8 * (e / 2)][8 * j + 2 * (lane % 4) + e % 2]);
        }
      }
    }
  };
  each([](float& mine, float& sum) { sum = mine; });
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < kColumns; ++n) sums[row][n] += a[row][k] * b_turned[k][n];
    }
  }
  each([](float& mine, float& sum) { mine = sum; });
}

// ---- a block ------------------------------------------------------------------------------------------------------

void end_some_work() {
  if (!box_copies.empty() && sometimes(settings.mode == kLate ? 64 : settings.mode == kEarly ? 1 : 6)) {
    const size_t index = random_below(static_cast<uint32_t>(box_copies.size()));
    const BoxCopy copy = box_copies[index];
    box_copies.erase(box_copies.begin() + static_cast<std::ptrdiff_t>(index));
    carry_out(copy);
  }
  if (settings.mode == kLate) return;  // the rest ends when its thread waits for it
  const uint32_t one_in = settings.mode == kEarly ? 1 : 6;
  Warp& warp = warps[random_below(static_cast<uint32_t>(warps.size()))];
  if (!warp.products.empty() && sometimes(one_in)) {
    carry_out(warp.products.front());
    warp.products.pop_front();
  }
  Copies& some = copies[random_below(static_cast<uint32_t>(copies.size()))];
  if (!some.pending.empty() && some.pending.front().group < some.group && sometimes(one_in)) {
    carry_out(some.pending.front());
    some.pending.pop_front();
  }
}

void start_block(unsigned threads) {
  phases.clear();
  meetings.clear();
  box_copies.clear();
  warps.assign(threads / kWarp, {});
  copies.assign(threads, {});
  seen.assign(threads, Times(threads, 0));
  now.assign(threads, 1);
  words.assign(kSharedMost / 4, {});
  if (shared_bytes) std::memset(shared_memory, 0xff, shared_bytes);  // NaN in every format
  fibres.resize(threads);
  while (stacks.size() < threads) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stacks.push_back(static_cast<unsigned char*>(stack));
  }
  for (unsigned thread = 0; thread < threads; ++thread) prepare_fibre(fibres[thread], stacks[thread]);
}

// Lets one warp's fibres run; returns how many did.
int run_warp(int warp) {
  int ran = 0;
  for (int lane = 0; lane < kWarp && !failed; ++lane) {
    Fibre& fibre = fibres[warp * kWarp + lane];
    if (fibre.done) continue;
    if (fibre.ready) {
      if (!fibre.ready()) continue;
      fibre.ready = nullptr;
    }
    current = warp * kWarp + lane;
    thread_index = {static_cast<unsigned>(current)};
    bench_switch(&scheduler, fibre.stack_pointer);
    current = -1;
    ++ran;
  }
  return ran;
}

void run_block(unsigned block, unsigned threads) {
  block_index = {block};
  start_block(threads);
  std::vector<int> order(threads / kWarp);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  // Now and then one warp is much slower than all others.
  const int slow = sometimes(3) ? static_cast<int>(random_below(static_cast<uint32_t>(order.size()))) : -1;
  const auto alive = [] { return std::any_of(fibres.begin(), fibres.end(), [](auto& f) { return !f.done; }); };
  int idle = 0;
  while (!failed && alive()) {
    std::shuffle(order.begin(), order.end(), generator);
    int ran = 0;
    for (const int warp : order) {
      if (warp == slow && !sometimes(16)) continue;
      end_some_work();
      ran += run_warp(warp);
    }
    idle = ran ? 0 : idle + 1;
    if (idle > 20000) {
      error = "all threads of block " + std::to_string(block) + " wait for ever";
      failed = true;
    }
  }
  if (failed) return;
  const auto pending = [](auto& all) {
    return std::any_of(all.begin(), all.end(), [](auto& each) { return !each.pending.empty(); });
  };
  const auto multiplies = std::any_of(warps.begin(), warps.end(), [](auto& w) { return !w.products.empty(); });
  if (!box_copies.empty() || pending(copies) || multiplies) {
    error = "block " + std::to_string(block) + " ended with work in flight";
    failed = true;
  }
}

}  // namespace

void fail(const char* what) {
  end_launch(what);
  if (current < 0) {
    std::fprintf(stderr, "%s\n", error.c_str());
    std::abort();  // the machine itself, outside of any thread
  }
  for (;;) leave();
}

void allow_shared(const void* handle, size_t bytes) { shared_limits[handle] = bytes; }

void touch(const void* address, int bytes, bool written) {
  const auto place = reinterpret_cast<uintptr_t>(address);
  if (place % static_cast<uintptr_t>(bytes)) fail("an access to memory that is not aligned");
  if (current < 0) return;
  const auto stack = reinterpret_cast<uintptr_t>(stacks[current]);
  if (place - stack < kStackBytes) return;
  if (!in_an_operand(address, bytes, written)) fail(kOutside);
}

void launch(unsigned char* shared, unsigned grid, unsigned threads, size_t bytes, cudaStream_t stream,
            const std::function<void()>& kernel, const void* handle) {
  generator.seed(settings.seed++);
  body = &kernel;
  grid_size = {grid};
  shared_memory = shared;
  shared_bytes = bytes;
  failed = false;
  if (stream != nullptr && reinterpret_cast<intptr_t>(stream) - 1 != current_device) {
    error = "a launch into a stream of another device";
    return;
  }
  const auto limit = shared_limits.find(handle);
  if (bytes > (limit == shared_limits.end() ? kSharedLimit : limit->second)) {
    error = "more shared memory than this kernel may have";
    return;
  }
  std::vector<unsigned> blocks(std::min(settings.blocks, grid - settings.first_block));
  std::iota(blocks.begin(), blocks.end(), static_cast<unsigned>(settings.first_block));
  std::shuffle(blocks.begin(), blocks.end(), generator);
  left_numbers.clear();
  wrapped = last_block = false;
  for (const unsigned block : blocks) {
    next_number = 0;
    last_block = block == blocks.back();
    if (!failed) run_block(block, threads);
  }
}

uint32_t count(uint32_t* counter, uint32_t most) {
  touch(counter, 4, true);
  const auto left = left_numbers.lower_bound(next_number);
  uint32_t number;
  if (left != left_numbers.end() && (last_block || wrapped || sometimes(2))) {
    number = *left;
    left_numbers.erase(left);
  } else {
    while (!last_block && *counter < most && sometimes(2)) left_numbers.insert((*counter)++);
    number = *counter;
    wrapped = number >= most;
    *counter = wrapped ? 0 : number + 1;
  }
  next_number = number + 1;
  return number;
}

uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared_memory);
  return offset + kSharedBase;
}

void load_shared(uint32_t address, void* value, int bytes) {
  if (address % static_cast<uint32_t>(bytes)) fail("a load that is not aligned");
  let_others_run(64);
  std::memcpy(value, at(address, static_cast<uint32_t>(bytes)), static_cast<size_t>(bytes));
  note_read(address, bytes);
}

void store_shared(uint32_t address, const void* value, int bytes) {
  if (address % static_cast<uint32_t>(bytes)) fail("a store that is not aligned");
  let_others_run(64);
  std::memcpy(at(address, static_cast<uint32_t>(bytes)), value, static_cast<size_t>(bytes));
  note_write(address, bytes);
}

void load_matrices(uint32_t (&value)[4], uint32_t address) {
  struct Argument {
    uint32_t* value;
    uint32_t address;
  } mine{value, address};
  if (address % 16) fail("an ldmatrix that is not aligned");
  at(address, 16);
  note_read(address, 16);
  together("ldmatrix.trans", &mine, [&](Warp& warp) {
    // Lane 8 i + r has the address of row r of matrix i.
    uint16_t matrices[4][8][8];
    for (int lane = 0; lane < kWarp; ++lane) {
      const auto& each = *static_cast<Argument*>(warp.arguments[lane]);
      std::memcpy(matrices[lane / 8][lane % 8], at(each.address, 16), 16);
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, col = 2 * (lane % 4);
        const uint16_t low = matrices[i][col][row];
        const uint16_t high = matrices[i][col + 1][row];
        static_cast<Argument*>(warp.arguments[lane])->value[i] = low | static_cast<uint32_t>(high) << 16;
      }
    }
  });
}

void copy_async(uint32_t target, const void* source, bool valid) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16) fail("a cp.async that is not aligned");
  if (valid) touch(source, 16, false);
  at(target, 16);
  note_write(target, 16);
  copies[current].pending.push_back({target, source, valid, copies[current].group});
}

void copy_commit() { ++copies[current].group; }

void copy_wait(int pending) {
  Copies& mine = copies[current];
  while (!mine.pending.empty() && mine.pending.front().group < mine.group - pending) {
    carry_out(mine.pending.front());
    mine.pending.pop_front();
  }
}

void barrier_sync(int id, int count) {
  if (id < 0 || id > 15) fail("there are barriers 0 to 15");
  if (count == 0) count = static_cast<int>(fibres.size());
  Meeting& meeting = meetings[id];
  if (meeting.present.empty()) meeting.count = count;
  if (meeting.count != count) fail("threads disagree on how many meet at a barrier");
  meeting.present.push_back(current);
  if (static_cast<int>(meeting.present.size()) < count) {
    wait_until([&meeting, before = meeting.generation] { return meeting.generation != before; });
    return;
  }
  Times all(fibres.size(), 0);
  for (const int thread : meeting.present) {
    join(all, seen[thread]);
    all[thread] = std::max(all[thread], now[thread]);
  }
  for (const int thread : meeting.present) {
    seen[thread] = all;
    ++now[thread];
  }
  meeting.present.clear();
  ++meeting.generation;
  let_others_run(4);
}

uint32_t exchange(uint32_t value, int distance) {
  uint32_t given[2] = {value, 0};
  together("shfl.bfly", given, [distance](Warp& warp) {
    const auto of_lane = [&warp](int lane) { return static_cast<uint32_t*>(warp.arguments[lane]); };
    for (int lane = 0; lane < kWarp; ++lane) of_lane(lane)[1] = of_lane(lane ^ distance)[0];
  });
  return given[1];
}

void phase_init(uint32_t barrier, uint32_t arrivals) {
  if (barrier % 8) fail("an mbarrier that is not aligned");
  at(barrier, 8);
  Phase phase;
  phase.arrivals = phase.missing = static_cast<int>(arrivals);
  phase.known.assign(fibres.size(), 0);
  phase.maker = current;
  phase.made = now[current];
  phases[barrier] = phase;
}

void phase_init_fence() {
  for (auto& [barrier, phase] : phases) phase.fenced |= phase.maker == current;
}

void phase_arrive(uint32_t barrier, uint32_t bytes) {
  Phase& phase = phase_at(barrier);
  join(phase.known, seen[current]);
  phase.known[current] = std::max(phase.known[current], now[current]);
  ++now[current];
  phase.bytes += bytes;
  if (--phase.missing < 0) fail("too many arrive at an mbarrier");
  phase.settle();
  let_others_run(8);
}

void phase_wait(uint32_t barrier, uint32_t parity) {
  Phase& phase = phase_at(barrier);
  wait_until([&phase, parity] { return phase.parity != parity; });
  join(seen[current], phase.known);
}

void copy_box(uint32_t target, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  BoxCopy copy{{}, target, barrier, {x, y, z}};
  std::memcpy(&copy.map, map, sizeof copy.map);
  if (copy.map.magic != kMagic) fail("this is no description of a tensor");
  if (target % 1024) fail("the pattern of the swizzle starts on 1024 bytes");
  if (!phase_at(barrier).fenced) fail("a barrier that only its block knows: no fence after its initialisation");
  box_copies.push_back(copy);
}

void group_fence() {
  together("wgmma.fence", nullptr, [](Warp& warp) { warp.fenced = true; });
}

void group_commit() {
  together("wgmma.commit_group", nullptr, [](Warp& warp) { ++warp.group; });
}

void group_wait(int pending) {
  together("wgmma.wait_group", nullptr, [pending](Warp& warp) {
    while (!warp.products.empty() && warp.products.front().group < warp.group - pending) {
      carry_out(warp.products.front());
      warp.products.pop_front();
    }
    if (pending == 0) warp.fenced = false;
  });
}

void group_multiply(float* d, uint64_t a, uint64_t b, bool half) {
  Warp& mine = warps[current / kWarp];
  if (mine.arrived == 0) {
    mine.descriptors[0] = a;
    mine.descriptors[1] = b;
  }
  if (mine.descriptors[0] != a || mine.descriptors[1] != b) fail("lanes of a warp disagree on a descriptor");
  const int rows = 16 * (current / kWarp % 4);
  together("wgmma", d, [=](Warp& warp) {
    if (!warp.fenced) fail("a wgmma without a fence after its accumulators were last touched");
    Product product{{}, a, b, half, rows, warp.group};
    for (int lane = 0; lane < kWarp; ++lane) product.d[lane] = static_cast<float*>(warp.arguments[lane]);
    warp.products.push_back(product);
  });
}

}  // namespace bench

namespace {

// Refuses what the driver's function refuses.
CUresult encode(CUtensorMap* out, CUtensorMapDataType, cuuint32_t rank, void* base, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 3 || reinterpret_cast<uintptr_t>(base) % 16 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (int i = 0; i < 3; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32 || box[i] == 0 || box[i] > 256 || steps[i] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  for (int i = 0; i < 2; ++i) {
    if (strides[i] % 16 || strides[i] >= uint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
  }
  if (2 * box[0] > 128 || 2 * box[0] % 16) return CUDA_ERROR_INVALID_VALUE;
  const bench::TensorMap map{bench::kMagic,
                             {box[0], box[1], box[2]},
                             {sizes[0], sizes[1], sizes[2]},
                             {strides[0], strides[1]},
                             static_cast<const unsigned char*>(base)};
  static_assert(sizeof map <= sizeof(CUtensorMap));
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace

void* bench_tensor_map_encoder() { return reinterpret_cast<void*>(&encode); }

extern "C" {

int bench_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      return bench::current_device == 0 ? bench::settings.major : bench::settings.second_major;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 227 * 1024;
    case cudaDevAttrMultiProcessorCount:
      return bench::settings.processors;
    default:
      return 0;
  }
}

// Makes one of two devices the current one, and returns the one before.
int bench_set_device(int index) { return std::exchange(bench::current_device, index); }

// Each number of multiprocessors is a device of its own: launchers remember what they have asked.
int bench_device() {
  static std::map<std::pair<int, int>, int> devices;
  const auto known = static_cast<int>(devices.size());
  return devices.emplace(std::pair(bench::settings.processors, bench::current_device), known).first->second;
}

// Before each launch: how many multiprocessors, of which generation, when asynchronous work ends, the seed, and the
// generation of the second device. The first device is the current one.
void bench_configure(int processors, int major, int mode, uint64_t seed, int second_major) {
  bench::settings = {processors, major, mode, seed, second_major};
  bench::current_device = 0;
  bench::error.clear();
}

// Of the next launches only these blocks run, with the memory and the time of all others saved.
void bench_blocks(uint64_t first, uint64_t count) {
  bench::settings.first_block = first;
  bench::settings.blocks = count;
}

// Names an operand of the next launches, which may then access no other memory; bench_forget forgets all of them.
void bench_operand(const void* base, int64_t row, int64_t rows, int64_t matrices, int64_t row_stride,
                   int64_t matrix_stride, int read, int written) {
  bench::operands.push_back({static_cast<const unsigned char*>(base),
                             {row, rows, matrices},
                             {rows > 1 ? row_stride : 0, matrices > 1 ? matrix_stride : 0},
                             read != 0,
                             written != 0});
}
void bench_forget() { bench::operands.clear(); }

// What went wrong in the launches since; empty if nothing did.
const char* bench_error() { return bench::error.c_str(); }
}
