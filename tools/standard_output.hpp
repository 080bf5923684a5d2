// Notices that standard output was lost, as on a full disk.
#pragma once

#include <cstddef>

namespace skim::tool {

// Opens /dev/null in place of standard input, output and error where they are closed. Otherwise the
// next file that is opened would take their place. Writing to standard output still fails.
void hold_standard_descriptors();

// Writes past stdio. It ends early if a signal interrupts it, and the rest is lost.
void write_to_standard_output(const char* data, std::size_t size);

// errno of the first such write that failed; 0: none has.
int standard_output_error();

// Flushes standard output at the end of the program. Returns the program's exit status, which is
// 1 instead of 0 if anything written there was lost. One line then says so.
int end_standard_output(int status);

}  // namespace skim::tool
