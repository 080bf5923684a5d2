// The library's errors as Python exceptions.
#include "python/bindings/bindings.hpp"

namespace skim::python {
namespace {

// Owned by the module, which is never unloaded.
struct Types {
  PyObject *error, *invalid_argument, *comm, *non_finite, *state, *decode;
} types;

PyObject* new_type(nb::module_& m, const char* name, const char* doc, nb::object bases,
                   nb::dict attributes = {}) {
  const std::string full = nb::cast<std::string>(m.attr("__name__")) + "." + name;
  PyObject* const type =
      PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), attributes.ptr());
  if (type == nullptr) throw nb::python_error();
  m.attr(name) = nb::handle(type);
  return type;
}

void raise_comm(const CommError& e) {
  nb::object error = nb::handle(types.comm)(e.what());
  error.attr("peer") = e.peer();
  error.attr("phase") = e.phase();
  PyErr_SetObject(types.comm, error.ptr());
}

}  // namespace

void raise_invalid_argument(const char* what) {
  PyErr_SetString(types.invalid_argument, what);
  throw nb::python_error();
}
void raise_decode_error(const std::string& what) {
  PyErr_SetString(types.decode, what.c_str());
  throw nb::python_error();
}

void bind_errors(nb::module_& m) {
  types.error = new_type(m, "Error",
                         "The base class of all exceptions that Skim "
                         "raises.",
                         nb::borrow(PyExc_RuntimeError));
  const nb::object error = nb::borrow(types.error);
  types.invalid_argument = new_type(
      m, "InvalidArgument", "An argument is wrong. Nothing has changed and nothing was sent.",
      nb::make_tuple(error, nb::borrow(PyExc_ValueError)));
  nb::dict comm;
  comm["peer"] = -1;
  comm["phase"] = "";
  types.comm = new_type(
      m, "CommError",
      "A peer or a link failed, or a wait took too long. `peer` is the rank that failed (-1: not "
      "known). `phase` is the operation that failed. The group cannot be used any more: restart "
      "every rank from a checkpoint.",
      error, comm);
  types.non_finite =
      new_type(m, "NonFiniteError",
               "A gradient of the group held NaN or infinity. The step was taken back on every "
               "rank, and training may go on.",
               error);
  types.state = new_type(m, "StateError",
                         "A saved state is damaged, of another version, or does not fit.", error);
  types.decode =
      new_type(m, "DecodeError", "The bytes are not a valid frame, or not the expected one.",
               nb::make_tuple(error, nb::borrow(PyExc_ValueError)));
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const InvalidArgument& e) {
      PyErr_SetString(types.invalid_argument, e.what());
    } catch (const CommError& e) {
      raise_comm(e);
    } catch (const NonFiniteError& e) {
      PyErr_SetString(types.non_finite, e.what());
    } catch (const StateError& e) {
      PyErr_SetString(types.state, e.what());
    } catch (const Error& e) {
      PyErr_SetString(types.error, e.what());
    }
  });
}

}  // namespace skim::python
