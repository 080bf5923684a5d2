/* A C program outside of Skim: one step on one rank, which is the identity. */
#include <skim/c_api.h>
#include <stdio.h>

int main(void) {
  skim_communicator* alone = NULL;
  skim_reducer* reducer = NULL;
  const skim_parameter layout = {0, "x", 4};
  float gradient[4] = {1.0F, 0.0F, 8.0F, 0.5F};
  if (skim_in_process_group(1, 60.0, &alone) != SKIM_OK ||
      skim_reducer_new(alone, "density=1", &reducer) != SKIM_OK ||
      skim_reducer_set_layout(reducer, &layout, 1) != SKIM_OK ||
      skim_reducer_reduce(reducer, 0, gradient, 4, SKIM_F32, NULL) != SKIM_OK ||
      skim_reducer_end_step(reducer, 0.0, NULL) != SKIM_OK) {
    fprintf(stderr, "%s\n", skim_last_error());
    return 1;
  }
  skim_reducer_free(reducer);
  skim_communicator_free(alone);
  if (gradient[0] != 1.0F || gradient[2] != 8.0F) return 1;
  printf("skim %s works from C\n", skim_version());
  return 0;
}
