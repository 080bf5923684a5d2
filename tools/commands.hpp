// The tool's commands. argv[0] is the command's name. Each returns the exit status.
#pragma once

namespace skim::tool {

int train_command(int argc, char** argv);
int bench_command(int argc, char** argv);
int bench_select_command(int argc, char** argv);
int bench_network_command(int argc, char** argv);
int bench_wire_command(int argc, char** argv);
int bench_scaling_command(int argc, char** argv);
int checkpoint_command(int argc, char** argv);
int inspect_command(int argc, char** argv);
int plan_command(int argc, char** argv);
int report_command(int argc, char** argv);
int simulate_command(int argc, char** argv);

}  // namespace skim::tool
