#define FOREDRAFT_ISA isa_portable
#define FOREDRAFT_ISA_NAME "portable"
#define FOREDRAFT_TABLE kPortableKernels
#include "kernels_impl.h"
