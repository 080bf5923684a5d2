// Notices that standard output was lost, as on a full disk.
#pragma once

#include <cstddef>
#include <string_view>

namespace skim::tool {

// Opens /dev/null in place of standard input, output and error where they are closed. Otherwise the
// next file that is opened would take their place. Writing to standard output still fails.
void hold_standard_descriptors();

// Writes past stdio, at most PIPE_BUF bytes. If poll() has said that standard output takes some, it
// does not wait. Returns how many bytes are done with: written, or lost because writing fails; 0: a
// signal came first.
std::size_t write_to_standard_output(std::string_view data);

// errno of the first such write that failed; 0: none has.
int standard_output_error();

// Flushes standard output at the end of the program. Returns the program's exit status, which is
// 1 instead of 0 if anything written there was lost. One line then says so.
int end_standard_output(int status);

}  // namespace skim::tool
