# How CUDA sources are compiled.

function(skim_cuda_options target)
  # The same bits as on the CPU: no contraction of a*b+c, no fast math. The kernels call constexpr functions
  # of the standard library, such as std::bit_cast.
  # CMake 3.25 does not know that nvcc 13 has C++20, hence the plain -std.
  target_compile_options(${target} PRIVATE -std=c++20 --fmad=false --expt-relaxed-constexpr
    -Xcompiler=-ffp-contract=off,-Wall,-Wextra,-Wshadow,-Wconversion)
  if(SKIM_DEVELOPER)
    target_compile_options(${target} PRIVATE -Werror=all-warnings)
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()
