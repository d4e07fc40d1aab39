// Stands for torch's header: makes a device of the bench the current one. A tensor of the CPU counts as on device 0.
#pragma once

#include <c10/core/Device.h>

extern "C" int bench_set_device(int index);

namespace c10::cuda {

class CUDAGuard {
 public:
  explicit CUDAGuard(DeviceIndex index) : before_(bench_set_device(index < 0 ? 0 : index)) {}
  explicit CUDAGuard(Device device) : CUDAGuard(device.index()) {}
  ~CUDAGuard() { bench_set_device(before_); }

 private:
  const int before_;
};

}  // namespace c10::cuda
