// Stands for torch's header: a stream of a device of the bench, whose handle is the device's index plus one.
#pragma once

#include <c10/core/Device.h>

typedef struct CUstream_st* cudaStream_t;

namespace c10::cuda {

struct CUDAStream {
  DeviceIndex device;
  cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(static_cast<intptr_t>(device) + 1); }
};

inline CUDAStream getCurrentCUDAStream(DeviceIndex index) { return {static_cast<DeviceIndex>(index < 0 ? 0 : index)}; }

}  // namespace c10::cuda
