// Words for status codes.
#include <cuda_runtime.h>

#include "../include/muon_cuda.h"

extern "C" const char* muon_status_name(int status) {
  switch (status) {
    case MUON_OK:
      return "ok";
    case MUON_BAD_ARGUMENT:
      return "bad argument";
    case MUON_SHAPE_UNSUPPORTED:
      return "shape not supported by this kernel: m, k and all strides must be positive multiples of 8";
    case MUON_MISALIGNED:
      return "a pointer is not aligned";
    case MUON_DTYPE_UNSUPPORTED:
      return "dtype not supported by this kernel";
    case MUON_DEVICE_UNSUPPORTED:
      return "this device cannot run this kernel";
    case MUON_NOT_COMPILED:
      return "this build holds no code of this kernel for this device";
    case MUON_DRIVER_ERROR:
      return "the driver refused a TMA descriptor";
    default:
      return status > 0 ? cudaGetErrorString(static_cast<cudaError_t>(status)) : "unknown status";
  }
}
