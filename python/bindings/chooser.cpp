// The chooser behind exchange="auto": it chooses the exchange of each bucket.
#include "skim/chooser.hpp"

#include "python/bindings/keywords.hpp"

namespace skim::python {
namespace {

using namespace nb::literals;

struct BoundChooser {
  Communicator& comm;
  std::unique_ptr<Chooser> chooser;
};

std::string_view name_at(const BoundChooser& self, std::size_t i) {
  return name_of(self.chooser->candidates()[i].kind);
}

}  // namespace

void bind_chooser(nb::module_& m) {
  const auto help = KeywordHelp::of<ChooserKeywords>();
  const std::string signature =
      "def __init__(self, comm: Communicator, *, " + help.signature() + ") -> None";
  nb::class_<BoundChooser>(
      m, "Chooser",
      "Chooses the exchange of each bucket by the cost model, which it corrects by the times that "
      "the group measures. Reducer(exchange='auto') has one. Use it from one thread at a time.")
      .def(
          "__init__",
          [](BoundChooser* self, Communicator& comm, const nb::kwargs& options) {
            const auto o = read_keywords<ChooserKeywords>("skim.Chooser", options);
            new (self) BoundChooser{comm, make_chooser(o.exchange, o.chooser)};
          },
          "comm"_a, "options"_a, nb::keep_alive<1, 2>(), nb::sig(signature.c_str()),
          (help.text() +
           "The options of exchanges are those of every candidate.\n"
           "Raises InvalidArgument: an option is out of its range, or a candidate holds mass.")
              .c_str())
      .def_prop_ro(
          "candidates",
          [](const BoundChooser& self) {
            nb::list names;
            for (std::size_t i = 0; i < self.chooser->candidates().size(); ++i) {
              names.append(name_at(self, i));
            }
            return nb::tuple(names);
          },
          nb::sig("def candidates(self) -> tuple[str, ...]"),
          "The names of the exchanges that it chooses among, equal on all ranks.")
      .def(
          "choose",
          [](BoundChooser& self, std::size_t n, std::size_t k, std::size_t k_down,
             std::uint64_t step, Slot slot) {
            std::size_t chosen = 0;
            {
              const nb::gil_scoped_release no_gil;
              chosen = self.chooser->choose({step, slot}, n, {.k = k, .k_down = k_down}, self.comm);
            }
            return name_at(self, chosen);
          },
          "n"_a, nb::kw_only(), "k"_a, "k_down"_a = 0, "step"_a = 0, "slot"_a = 0,
          "Returns the name of the exchange for this bucket of n entries, equal on all ranks. "
          "'dense': sum the bucket whole (Communicator.allreduce_sum). k, k_down: as in "
          "Exchange.run. Collective.")
      .def(
          "told",
          [](const BoundChooser& self, Slot slot) {
            const Chooser::Times told = self.chooser->told(slot);
            return std::pair(told.bucket_s, told.pair_s);
          },
          "slot"_a = 0,
          "Returns (bucket_s, pair_s) for the GroupStats that this rank sends with the slot's "
          "bucket.")
      .def(
          "took",
          [](BoundChooser& self, double seconds, const std::pair<float, float>& heard,
             std::uint64_t step, Slot slot) {
            self.chooser->took({step, slot}, static_cast<std::int64_t>(seconds * 1e9),
                               {heard.first, heard.second});
          },
          "seconds"_a, "heard"_a = std::pair(0.0F, 0.0F), nb::kw_only(), "step"_a = 0, "slot"_a = 0,
          "Call it after each bucket.\n"
          "  seconds  time that selection, exchange and apply took together on this rank\n"
          "  heard    the sums over the ranks of bucket_s and pair_s, which are equal on all ranks")
      .def(
          "decision",
          [](const BoundChooser& self, Slot slot) {
            return std::string(self.chooser->decision(slot));
          },
          "slot"_a,
          "The slot's exchange and the reason for it, in one line that begins with the "
          "exchange's name. Empty before the slot's first bucket, and if there is nothing to "
          "choose.");
}

}  // namespace skim::python
