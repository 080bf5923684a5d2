# Finds libtorch, PyTorch's C++ library, as the imported target Libtorch::Libtorch: the CPU part.
#
# Looks in CMAKE_PREFIX_PATH, then in the project's own environment (.venv). A prefix may be an
# unzipped libtorch/, the torch folder of a pip package, its share/cmake, or a Python environment.
#
# Not find_package(Torch): that demands a CUDA toolkit when the installed torch is a CUDA build.
# The CPU library of such a build works on a machine without CUDA.
#
# Sets: Libtorch_FOUND, Libtorch_VERSION, Libtorch_PREFIX. find_package(Libtorch 2.0 REQUIRED) or
# without a version; older than 2.0 is always refused.

function(_libtorch_find result)
  set(prefixes ${Libtorch_ROOT} ${CMAKE_PREFIX_PATH})
  foreach(variable Libtorch_ROOT CMAKE_PREFIX_PATH)
    if(DEFINED ENV{${variable}})
      string(REPLACE ":" ";" from_environment "$ENV{${variable}}")
      list(APPEND prefixes ${from_environment})
    endif()
  endforeach()
  list(APPEND prefixes ${PROJECT_SOURCE_DIR}/.venv)
  foreach(prefix IN LISTS prefixes)
    file(GLOB environments LIST_DIRECTORIES true ${prefix}/lib/python3*/site-packages/torch)
    foreach(candidate ${prefix} ${prefix}/torch ${prefix}/libtorch ${prefix}/../..
                      ${prefix}/../../.. ${environments})
      if(EXISTS ${candidate}/lib/libtorch_cpu.so AND
         EXISTS ${candidate}/include/torch/csrc/api/include/torch/torch.h)
        get_filename_component(candidate ${candidate} ABSOLUTE)
        set(${result} ${candidate} PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
  set(${result} "" PARENT_SCOPE)
endfunction()

function(_libtorch_version prefix result)
  # Newest place first; the API's version.h only forwards to the first since torch 2.8.
  foreach(file headeronly/version.h csrc/api/include/torch/version.h)
    if(EXISTS ${prefix}/include/torch/${file})
      file(STRINGS ${prefix}/include/torch/${file} lines
           REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
      if(lines)
        string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
        string(JOIN "." version ${numbers})
        set(${result} ${version} PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  foreach(file version.py build-version)
    if(EXISTS ${prefix}/${file})
      file(READ ${prefix}/${file} text)
      if(text MATCHES "[0-9]+\\.[0-9]+\\.[0-9]+")
        set(${result} ${CMAKE_MATCH_0} PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(${result} "0" PARENT_SCOPE)
endfunction()

_libtorch_find(Libtorch_PREFIX)
set(_libtorch_problem "")
set(_libtorch_advice "Run scripts/test, or `pip install torch==2.13.0` in \
${PROJECT_SOURCE_DIR}/.venv, or point CMAKE_PREFIX_PATH at a libtorch; or build without the \
trainer: -DSKIM_TRAIN=OFF.")
set(_libtorch_least 2.0)
if(Libtorch_FIND_VERSION VERSION_GREATER _libtorch_least)
  set(_libtorch_least ${Libtorch_FIND_VERSION})
endif()
if(NOT Libtorch_PREFIX)
  set(_libtorch_problem "libtorch not found in CMAKE_PREFIX_PATH (${CMAKE_PREFIX_PATH}) or \
${PROJECT_SOURCE_DIR}/.venv.")
else()
  _libtorch_version(${Libtorch_PREFIX} Libtorch_VERSION)
  set(_libtorch_config ${Libtorch_PREFIX}/share/cmake/Torch/TorchConfig.cmake)
  if(Libtorch_VERSION VERSION_LESS _libtorch_least)
    set(_libtorch_problem "libtorch >= ${_libtorch_least} is needed, got ${Libtorch_VERSION} in \
${Libtorch_PREFIX}.")
  elseif(EXISTS ${_libtorch_config})
    file(STRINGS ${_libtorch_config} _libtorch_abi REGEX "_GLIBCXX_USE_CXX11_ABI=0")
    if(_libtorch_abi)
      set(_libtorch_problem "libtorch in ${Libtorch_PREFIX} is built with the old C++ ABI \
(_GLIBCXX_USE_CXX11_ABI=0), which does not link with this compiler's std::string; take one with \
the C++11 ABI.")
    endif()
  endif()
endif()

if(_libtorch_problem)
  set(Libtorch_FOUND FALSE)
  if(Libtorch_FIND_REQUIRED)
    message(FATAL_ERROR "${_libtorch_problem} ${_libtorch_advice}")
  elseif(NOT Libtorch_FIND_QUIETLY)
    message(STATUS "${_libtorch_problem} ${_libtorch_advice}")
  endif()
else()
  set(Libtorch_FOUND TRUE)
  if(NOT TARGET Libtorch::Libtorch)
    message(STATUS "Found libtorch ${Libtorch_VERSION}: ${Libtorch_PREFIX}")
    add_library(Libtorch::Libtorch INTERFACE IMPORTED)
    set(_libtorch_lib ${Libtorch_PREFIX}/lib)
    # One item, so that nothing comes between the two switches: operators register themselves when
    # libtorch_cpu is loaded, so it must stay needed however little of it is called by name.
    set_target_properties(Libtorch::Libtorch PROPERTIES
      INTERFACE_SYSTEM_INCLUDE_DIRECTORIES
        "${Libtorch_PREFIX}/include;${Libtorch_PREFIX}/include/torch/csrc/api/include"
      INTERFACE_INCLUDE_DIRECTORIES
        "${Libtorch_PREFIX}/include;${Libtorch_PREFIX}/include/torch/csrc/api/include"
      INTERFACE_LINK_LIBRARIES "-Wl,--push-state,--no-as-needed,\"${_libtorch_lib}/libtorch_cpu.so\",\
\"${_libtorch_lib}/libc10.so\",--pop-state"
      # A CUDA build's libtorch_cpu names CUDA libraries that a CPU machine lacks at link time.
      INTERFACE_LINK_OPTIONS "LINKER:-rpath,${_libtorch_lib};LINKER:--allow-shlib-undefined")
  endif()
endif()
