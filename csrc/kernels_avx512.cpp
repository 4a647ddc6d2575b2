#define FOREDRAFT_ISA isa_avx512
#define FOREDRAFT_ISA_NAME "avx512"
#define FOREDRAFT_TABLE kAvx512Kernels
#include "kernels_impl.h"
