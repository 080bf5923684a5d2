// The module skim._core.
#include "python/bindings/bindings.hpp"

NB_MODULE(_core, m) {
  using namespace skim::python;
  // A user's function, such as a cost, may refer to the schedule that holds it. Such a cycle lives
  // until the process ends. nanobind would report it as a leak, which would only worry users.
  nanobind::set_leak_warnings(false);
  m.attr("__version__") = SKIM_VERSION;
  bind_errors(m);
  bind_cost(m);
  bind_communicator(m);
  bind_transport(m);
  bind_selector(m);
  bind_codec(m);
  bind_feedback(m);
  bind_chooser(m);
  bind_schedule(m);
  bind_exchange(m);
  bind_local_half(m);
  bind_reducer(m);
  bind_analysis(m);
}
