// The module skim._core.
#include "python/bindings/bindings.hpp"

NB_MODULE(_core, m) {
  using namespace skim::python;
  // A function of the user's, a cost say, may refer to the schedule that holds it. Such a cycle
  // lives until the process ends, which is nothing to tell users about.
  nanobind::set_leak_warnings(false);
  m.attr("__version__") = SKIM_VERSION;
  bind_errors(m);
  bind_options(m);
  bind_communicator(m);
  bind_transport(m);
  bind_selector(m);
  bind_codec(m);
  bind_feedback(m);
  bind_cost(m);
  bind_chooser(m);
  bind_schedule(m);
  bind_exchange(m);
  bind_local_half(m);
  bind_reducer(m);
  bind_analysis(m);
}
