# Debian packages of the library, by `cpack` in the build folder. The trainer is not in them: it needs
# the libtorch of pip, which no Debian package has.
#   libskim-dev   headers, CMake and pkg-config files, and the static library or the link to the shared one
#   libskim0.1    the shared library; only with BUILD_SHARED_LIBS
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME skim)
set(CPACK_PACKAGE_CONTACT "Skim's maintainers <maintainers@localhost>" CACHE STRING "Maintainer of the Debian packages")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION
  "Headers and library of Skim for programs in C++20 and C11
Skim trains neural networks data-parallel over slow links
by top-k sparsification with error feedback.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libskim-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS libhwy-dev)  # pkg-config looks for it, also for a shared library
if(SKIM_MPI)
  string(APPEND CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS ", mpi-default-dev")
endif()
set(CPACK_COMPONENTS_ALL development)
if(BUILD_SHARED_LIBS)
  list(APPEND CPACK_COMPONENTS_ALL runtime)
  set(runtime libskim${SKIM_SOVERSION})
  set(CPACK_COMPONENT_RUNTIME_DESCRIPTION
    "The library for programs in C++, C and languages that call C
Skim trains neural networks data-parallel over slow links
by top-k sparsification with error feedback.")
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME ${runtime})
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
  string(APPEND CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS ", ${runtime} (= ${PROJECT_VERSION})")
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/debian/triggers "activate-noawait ldconfig\n")
  set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA ${CMAKE_CURRENT_BINARY_DIR}/debian/triggers)
endif()
# What Debian wants of every package: a copyright file that names the licence, and a changelog.
set(in ${CMAKE_CURRENT_SOURCE_DIR}/cmake/debian)
set(out ${CMAKE_CURRENT_BINARY_DIR}/debian)
string(TIMESTAMP CHANGELOG_DATE "%a, %d %b %Y %H:%M:%S +0000" UTC)  # SOURCE_DATE_EPOCH, if it is set
configure_file(${in}/changelog.in ${out}/changelog @ONLY)
find_program(GZIP gzip REQUIRED)
execute_process(COMMAND ${GZIP} -9nkf changelog WORKING_DIRECTORY ${out} COMMAND_ERROR_IS_FATAL ANY)
foreach(component IN LISTS CPACK_COMPONENTS_ALL)
  string(TOUPPER ${component} COMPONENT)
  set(doc ${CMAKE_INSTALL_DATADIR}/doc/${CPACK_DEBIAN_${COMPONENT}_PACKAGE_NAME})
  install(FILES ${in}/copyright ${out}/changelog.gz DESTINATION ${doc} COMPONENT ${component})
endforeach()
include(CPack)
