#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace foredraft {
namespace {

#if defined(FOREDRAFT_X86)
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool runs_avx512() {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bf16");
}
#endif

const Kernels& choose() {
    const char* wanted = std::getenv("FOREDRAFT_ISA");
    const std::string name = wanted ? wanted : "";
    if (!name.empty() && name != "avx512" && name != "avx2" && name != "portable")
        throw std::runtime_error("FOREDRAFT_ISA is '" + name + "', expected avx512, avx2 or portable");
    if (name == "portable") return kPortableKernels;
#if defined(FOREDRAFT_X86)
    if (name != "avx2" && runs_avx512()) return kAvx512Kernels;
    if (name == "avx512") throw std::runtime_error("FOREDRAFT_ISA is avx512, which this processor does not run");
    if (runs_avx2()) return kAvx2Kernels;
#endif
    if (!name.empty()) throw std::runtime_error("FOREDRAFT_ISA is " + name + ", which this processor does not run");
    return kPortableKernels;
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace foredraft
