#define FOREDRAFT_ISA isa_avx2
#define FOREDRAFT_ISA_NAME "avx2"
#define FOREDRAFT_TABLE kAvx2Kernels
#include "kernels_impl.h"
