// Parts of a reducer that Python chooses: the library's, or objects of the user's own.
#pragma once

#include <functional>
#include <iosfwd>
#include <memory>
#include <string>

#include "python/bindings/bindings.hpp"
#include "skim/exchange.hpp"
#include "skim/local_half.hpp"
#include "skim/reducer.hpp"
#include "skim/schedule.hpp"
#include "skim/select.hpp"

namespace skim::python {

struct BoundSelector {
  explicit BoundSelector(const SelectOptions& o) : options(o), selector(make_selector(o)) {}

  SelectOptions options;
  std::unique_ptr<Selector> selector;
  SparseBuffer selected;
};

// A schedule remembers what it was told, so that every reducer needs one of its own: `make` makes
// them, while `own` answers Python.
struct BoundSchedule {
  using Make = std::function<std::unique_ptr<DensitySchedule>()>;
  explicit BoundSchedule(Make m) : make(std::move(m)), own(make()) {}

  Make make;
  std::unique_ptr<DensitySchedule> own;
};

// The parts of one reducer: skim.Selector, or an object with select(); a float,
// skim.DensitySchedule, or an object with density(); an object that is a local half
// (skim.protocols). Throws: InvalidArgument: anything else.
std::unique_ptr<Selector> selector_of(const nb::object& selector);
std::unique_ptr<DensitySchedule> schedule_of(const nb::object& schedule);
std::unique_ptr<LocalHalf> local_half_of(const nb::object& local);

// Every part of the user's own has one of these: the Python object.
class OwnPart {
 public:
  explicit OwnPart(nb::object object) : object_(std::move(object)) {}
  ~OwnPart();
  OwnPart(const OwnPart&) = delete;
  OwnPart& operator=(const OwnPart&) = delete;

  PyObject* object() const { return object_.ptr(); }
  void let_go() { object_ = nb::none(); }

 protected:
  // Its state, by its methods save() -> bytes and load(bytes), if it has them.
  void save_own(std::ostream& out) const;
  // Throws: StateError, also where there is a state but no load().
  void load_own(std::istream& in) const;
  // The bytes that save_own() wrote. Throws: StateError.
  static std::string read_state(std::istream& in);

  nb::object object_;  // touched with the GIL only
};

}  // namespace skim::python
