// Shared by the files of the Python module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <string>
#include <string_view>

#include "skim/error.hpp"
#include "skim/types.hpp"

namespace skim::python {

namespace nb = nanobind;

void bind_errors(nb::module_& m);
void bind_communicator(nb::module_& m);
void bind_transport(nb::module_& m);
void bind_reducer(nb::module_& m);
void bind_selector(nb::module_& m);
void bind_codec(nb::module_& m);
void bind_feedback(nb::module_& m);
void bind_exchange(nb::module_& m);
void bind_chooser(nb::module_& m);
void bind_local_half(nb::module_& m);
void bind_schedule(nb::module_& m);
void bind_cost(nb::module_& m);
void bind_analysis(nb::module_& m);

// With the GIL: for what the library has no exception for, or must not take for its own.
[[noreturn]] void raise_invalid_argument(const char* what);
[[noreturn]] void raise_decode_error(const std::string& what);

// One dimension, contiguous, in host memory; of whoever speaks DLPack or the buffer protocol.
using FloatArray = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Throws: InvalidArgument: entries that are not float32, float16 or bfloat16.
GradView grad_view(const AnyArray& array, float scale);

inline nb::tuple names_tuple(std::span<const std::string_view> names) {
  nb::list list;
  for (const std::string_view name : names) list.append(nb::str(name.data(), name.size()));
  return nb::tuple(list);
}

}  // namespace skim::python
