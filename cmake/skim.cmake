# Warnings, sanitizers, and how tests are registered.

# For code that runs briefly and is mostly templates of other libraries: it compiles in a third less
# time. Behind the build type's own -O.
set(skim_little_optimization $<$<CONFIG:Release>:-O1>)

function(skim_compile_options target)
  # The same bits on every CPU target: g++ contracts a*b+c by default.
  target_compile_options(${target} PRIVATE -ffp-contract=off
    -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wnon-virtual-dtor
    -Woverloaded-virtual -Wnull-dereference
    # g++ 12 sees overflows in std::string at -O3 that are none (GCC bug 105651).
    "$<$<CXX_COMPILER_ID:GNU>:-Wno-restrict;-Wno-stringop-overflow;-Wno-array-bounds>")
  if(SKIM_DEVELOPER AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)  # others warn of other things
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  skim_sanitize(${target})
endfunction()

function(skim_sanitize target)
  if(SKIM_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${SKIM_SANITIZE} -fno-sanitize-recover=all
                                             -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${SKIM_SANITIZE})
  endif()
endfunction()

# skim_add_test(NAME LABEL label [TIMEOUT seconds] [SOURCES file...] [LIBRARIES lib...]
#               [FILTER of gtest] [HEADERS_OF target]):
# one gtest program, tests/NAME.cpp unless SOURCES says otherwise; each of its tests is a ctest.
# It includes the precompiled headers of HEADERS_OF. Without that and without LIBRARIES it includes
# gtest's, which the first such program compiles for all.
function(skim_add_test name)
  cmake_parse_arguments(arg "" "TIMEOUT;FILTER;HEADERS_OF" "LABEL;SOURCES;LIBRARIES" ${ARGN})
  if(NOT arg_SOURCES)
    set(arg_SOURCES ${name}.cpp)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(SKIM_SANITIZE)  # several times as slow
    math(EXPR arg_TIMEOUT "5 * ${arg_TIMEOUT}")
  endif()
  add_executable(${name} ${arg_SOURCES})
  skim_compile_options(${name})
  if(NOT arg_HEADERS_OF)  # g++ 14 takes precompiled headers with the same optimization only
    target_compile_options(${name} PRIVATE ${skim_little_optimization})
  endif()
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE skim::skim GTest::gtest_main ${arg_LIBRARIES})
  if(arg_HEADERS_OF)
    target_precompile_headers(${name} REUSE_FROM ${arg_HEADERS_OF})
  elseif(NOT arg_LIBRARIES)
    get_property(first GLOBAL PROPERTY skim_first_test)
    if(first)
      target_precompile_headers(${name} REUSE_FROM ${first})
    else()
      target_precompile_headers(${name} PRIVATE <gtest/gtest.h>)
      set_property(GLOBAL PROPERTY skim_first_test ${name})
    endif()
  endif()
  gtest_discover_tests(${name} TEST_PREFIX ${name}. DISCOVERY_TIMEOUT 120 TEST_FILTER "${arg_FILTER}"
    PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${arg_LABEL}")
endfunction()

# skim_add_mpi_test(NAME RANKS 1 2 3 4 SOURCES file... [TIMEOUT seconds]): the program under mpirun,
# one ctest per number of ranks, each running all of its tests on every rank.
function(skim_add_mpi_test name)
  cmake_parse_arguments(arg "" "TIMEOUT" "RANKS;SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  skim_compile_options(${name})
  target_compile_options(${name} PRIVATE ${skim_little_optimization})
  target_compile_definitions(${name} PRIVATE SKIM_TEST_MPI)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE skim::skim GTest::gtest MPI::MPI_CXX ${arg_LIBRARIES})
  skim_add_mpirun(${name} RANKS ${arg_RANKS} TIMEOUT "${arg_TIMEOUT}" COMMAND $<TARGET_FILE:${name}>)
endfunction()

# skim_add_mpirun(NAME RANKS 1 2 3 4 COMMAND program [argument...] [TIMEOUT seconds]): NAME.ranks1 ...
function(skim_add_mpirun name)
  cmake_parse_arguments(arg "" "TIMEOUT" "RANKS;COMMAND" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  foreach(ranks ${arg_RANKS})
    add_test(NAME ${name}.ranks${ranks} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks}
             ${arg_COMMAND})
    # As root in a container, and with more ranks than cores: Open MPI 4, then 5; MPICH needs neither.
    set_tests_properties(${name}.ranks${ranks} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS mpi
      PROCESSORS 2 ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;\
OMPI_MCA_rmaps_base_oversubscribe=1;OMPI_MCA_hwloc_base_binding_policy=none;\
OMPI_MCA_btl_vader_single_copy_mechanism=none;PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe")
  endforeach()
endfunction()
