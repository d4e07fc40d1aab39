// One macro for functions that the kernels run and that g++ compiles for the tests.
#pragma once

#ifdef __CUDACC__
#define MUON_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MUON_HOST_DEVICE inline
#endif
