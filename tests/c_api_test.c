/* The C interface: four ranks as threads, in a group of this process and over streams of bytes.
 * Compiled as C11. */
#include "skim/c_api.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { RANKS = 4, FIRST = 60, SECOND = 40, N = FIRST + SECOND, STEPS = 6, SAVED_AFTER = 3 };

#define CHECK(holds)                                                                     \
  do {                                                                                   \
    if (!(holds)) {                                                                      \
      fprintf(stderr, "%s:%d: %s; %s\n", __FILE__, __LINE__, #holds, skim_last_error()); \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

/* A failed call has this status, and its line has this word. */
#define CHECK_FAILS(call, status, word)               \
  do {                                                \
    CHECK((call) == (status));                        \
    CHECK(strstr(skim_last_error(), (word)) != NULL); \
    CHECK(strchr(skim_last_error(), '\n') == NULL);   \
  } while (0)

static const skim_parameter layout[] = {{7, "weights", FIRST}, {7, "bias", SECOND}};

/* Whole numbers, so that sums and means over 4 ranks are exact. */
static float gradient_of(int rank, int step, int i) {
  return (float)(4 * ((i * 7919 + rank * 104729 + step * 31) % 2003 - 1001));
}

static skim_reducer* new_reducer(skim_communicator* communicator, const char* options) {
  skim_reducer* reducer = NULL;
  CHECK(skim_reducer_new(communicator, options, &reducer) == SKIM_OK);
  CHECK(skim_reducer_set_layout(reducer, layout, 2) == SKIM_OK);
  return reducer;
}

/* ---- what each rank does -------------------------------------------------------------------- */

struct rank {
  skim_communicator* communicator;
  const char* options;
  void (*body)(struct rank*);
  int rank;
  float mean[STEPS][N], before[STEPS][N], after[STEPS][N];
  skim_report report;
  skim_state state;
  skim_status status;
  char error[200];
};

static void* run(void* rank) {
  ((struct rank*)rank)->body(rank);
  return NULL;
}

static void run_all(struct rank* ranks, int count, void (*body)(struct rank*)) {
  pthread_t threads[RANKS];
  for (int r = 0; r < count; ++r) {
    ranks[r].body = body;
    ranks[r].rank = r;
    CHECK(pthread_create(&threads[r], NULL, run, &ranks[r]) == 0);
  }
  for (int r = 0; r < count; ++r) pthread_join(threads[r], NULL);
}

static void train(struct rank* me, skim_reducer* reducer, int from, int to) {
  for (int step = from; step < to; ++step) {
    int apply = 0;
    CHECK(skim_reducer_residual(reducer, 7, me->before[step], N) == SKIM_OK);
    for (int i = 0; i < N; ++i) me->mean[step][i] = gradient_of(me->rank, step, i);
    if (step % 2 == 0) {
      CHECK(skim_reducer_reduce(reducer, 7, me->mean[step], N, SKIM_F32, &me->report) == SKIM_OK);
    } else {
      uint64_t ticket = 0;
      CHECK(skim_reducer_start(reducer, 7, me->mean[step], N, SKIM_F32, &ticket) == SKIM_OK);
      CHECK(skim_reducer_wait(reducer, ticket, &me->report) == SKIM_OK);
    }
    CHECK(skim_reducer_end_step(reducer, 0.0, &apply) == SKIM_OK && apply == 1);
    CHECK(skim_reducer_residual(reducer, 7, me->after[step], N) == SKIM_OK);
  }
}

static void train_whole(struct rank* me) {
  skim_reducer* reducer = new_reducer(me->communicator, me->options);
  train(me, reducer, 0, SAVED_AFTER);
  CHECK(skim_reducer_save(reducer, &me->state) == SKIM_OK);
  train(me, reducer, SAVED_AFTER, STEPS);
  /* The communicator may go first. */
  skim_communicator_free(me->communicator);
  skim_reducer_free(reducer);
}

static skim_state states[RANKS];

static void train_rest(struct rank* me) {
  skim_reducer* reducer = new_reducer(me->communicator, me->options);
  CHECK(skim_reducer_load(reducer, states, RANKS, 1, NULL) == SKIM_OK);
  train(me, reducer, SAVED_AFTER, STEPS);
  skim_reducer_free(reducer);
  skim_communicator_free(me->communicator);
}

/* ---- the laws ------------------------------------------------------------------------------- */

static void check_laws(struct rank* ranks) {
  size_t zeros = 0;
  for (int step = 0; step < STEPS; ++step) {
    for (int i = 0; i < N; ++i) {
      float before = 0.0F, after = 0.0F, delivered = RANKS * ranks[0].mean[step][i];
      for (int r = 0; r < RANKS; ++r) {
        before += ranks[r].before[step][i] + gradient_of(r, step, i);
        after += ranks[r].after[step][i];
      }
      CHECK(before == after + delivered); /* nothing is lost */
      zeros += ranks[0].mean[step][i] == 0.0F;
    }
    for (int r = 1; r < RANKS; ++r) { /* all ranks have the same bits */
      CHECK(memcmp(ranks[r].mean[step], ranks[0].mean[step], sizeof ranks[0].mean[step]) == 0);
    }
  }
  CHECK(zeros > STEPS * N / 4); /* it was sparse */
  CHECK(ranks[0].report.n == N && ranks[0].report.k == N / 10 && ranks[0].report.finite == 1);
  CHECK(ranks[0].report.dense == 0 && ranks[0].report.sent_bytes > 0);
}

/* ---- groups --------------------------------------------------------------------------------- */

static void in_process(struct rank* ranks) {
  skim_communicator* group[RANKS];
  CHECK(skim_in_process_group(RANKS, 60.0, group) == SKIM_OK);
  for (int r = 0; r < RANKS; ++r) ranks[r].communicator = group[r];
}

static int sockets[RANKS][RANKS]; /* [rank][peer] */
static int numbers[RANKS] = {0, 1, 2, 3};

static int send_all(void* rank, int to, const void* data, size_t bytes) {
  const char* at = data;
  while (bytes > 0) {
    const ssize_t n = send(sockets[*(int*)rank][to], at, bytes, MSG_NOSIGNAL);
    if (n < 0) return errno;
    at += n;
    bytes -= (size_t)n;
  }
  return 0;
}
static int receive_all(void* rank, int from, void* data, size_t bytes) {
  char* at = data;
  while (bytes > 0) {
    const ssize_t n = recv(sockets[*(int*)rank][from], at, bytes, 0);
    if (n <= 0) return n < 0 ? errno : EPIPE;
    at += n;
    bytes -= (size_t)n;
  }
  return 0;
}

static void over_sockets(struct rank* ranks) {
  for (int a = 0; a < RANKS; ++a) {
    skim_transport transport = {&numbers[a], send_all, receive_all, a, RANKS, 0};
    for (int b = 0; b < a; ++b) {
      int ends[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
      sockets[a][b] = ends[0];
      sockets[b][a] = ends[1];
    }
    CHECK(skim_communicator_over(&transport, &ranks[a].communicator) == SKIM_OK);
    CHECK(skim_communicator_rank(ranks[a].communicator) == a);
    CHECK(skim_communicator_size(ranks[a].communicator) == RANKS);
  }
}
static void close_sockets(void) {
  for (int a = 0; a < RANKS; ++a) {
    for (int b = 0; b < RANKS; ++b) {
      if (a != b) close(sockets[a][b]);
    }
  }
}

static void laws_hold(void (*make_group)(struct rank*), const char* options) {
  static struct rank whole[RANKS], rest[RANKS];
  for (int r = 0; r < RANKS; ++r) whole[r].options = rest[r].options = options;
  make_group(whole);
  run_all(whole, RANKS, train_whole);
  check_laws(whole);

  /* A run that continues is a run that had not stopped. */
  for (int r = 0; r < RANKS; ++r) states[r] = whole[r].state;
  if (make_group == over_sockets) close_sockets();
  make_group(rest);
  run_all(rest, RANKS, train_rest);
  if (make_group == over_sockets) close_sockets();
  for (int r = 0; r < RANKS; ++r) {
    for (int step = SAVED_AFTER; step < STEPS; ++step) {
      CHECK(memcmp(rest[r].mean[step], whole[r].mean[step], sizeof rest[r].mean[step]) == 0);
    }
    skim_state_free(&whole[r].state);
    CHECK(whole[r].state.data == NULL && whole[r].state.bytes == 0);
  }
}

/* ---- errors --------------------------------------------------------------------------------- */

static void arguments_are_refused(void) {
  skim_communicator* alone = NULL;
  skim_reducer *reducer = NULL, *none = NULL;
  const skim_status wrong = SKIM_INVALID_ARGUMENT;
  CHECK(strcmp(skim_last_error(), "") == 0);
  CHECK_FAILS(skim_in_process_group(0, 60.0, &alone), wrong, "size");
  CHECK_FAILS(skim_in_process_group(1, 0.0, &alone), wrong, "timeout_s");
  CHECK_FAILS(skim_in_process_group(1, 60.0, NULL), wrong, "group is NULL");
  CHECK(alone == NULL);
  CHECK(skim_in_process_group(1, 1e-9, &alone) == SKIM_OK);
  skim_communicator_free(alone);
  CHECK(skim_in_process_group(1, 60.0, &alone) == SKIM_OK);

  CHECK_FAILS(skim_reducer_new(NULL, "", &none), wrong, "communicator is NULL");
  CHECK_FAILS(skim_reducer_new(alone, "density", &none), wrong, "NAME=VALUE, got 'density'");
  CHECK_FAILS(skim_reducer_new(alone, "densty=1", &none), wrong, "no option 'densty'; there are:");
  CHECK_FAILS(skim_reducer_new(alone, "density=2", &none), wrong,
              "density: must be a number in (0, 1], not '2'");
  CHECK_FAILS(skim_reducer_new(alone, "density=0.1x", &none), wrong, "not '0.1x'");
  CHECK_FAILS(skim_reducer_new(alone, "density=1 density=1", &none), wrong, "twice");
  CHECK_FAILS(skim_reducer_new(alone, "dense_below=-1", &none), wrong, "a whole number >= 0");
  CHECK_FAILS(skim_reducer_new(alone, "feedback=1", &none), wrong, "true or false");
  CHECK_FAILS(skim_reducer_new(alone, "exchange=telepathy", &none), wrong, "there are: dense");
  CHECK_FAILS(skim_reducer_new(alone, "exchange=hierarchical inside=hierarchical", &none), wrong,
              "inside: no 'hierarchical'");
  CHECK_FAILS(skim_reducer_new(alone, "among=gtopk", &none), wrong, "needs exchange=auto");
  CHECK_FAILS(skim_reducer_new(alone, "select=threshold", &none), wrong,
              "needs select_threshold > 0");
  CHECK_FAILS(skim_reducer_new(alone, "exchange=auto among=gtopk,x", &none), wrong, "no 'x'");
  CHECK(none == NULL);

  reducer = new_reducer(
      alone,
      "exchange=auto among=gtopk,allgather\tvalue_code=q4 index_code=auto feedback=true "
      "momentum_correction=0.9 select_block=32");
  float gradient[N] = {0};
  uint64_t ticket = 0;
  skim_report report = {0};
  const int unknown = 9;
  CHECK_FAILS(skim_reducer_set_layout(reducer, NULL, 1), wrong, "parameters is NULL");
  CHECK_FAILS(skim_reducer_reduce(NULL, 7, gradient, N, SKIM_F32, NULL), wrong, "reducer is NULL");
  CHECK_FAILS(skim_reducer_reduce(reducer, 8, gradient, N, SKIM_F32, NULL), wrong, "slot");
  CHECK_FAILS(skim_reducer_reduce(reducer, 7, gradient, N - 1, SKIM_F32, NULL), wrong, "99");
  CHECK_FAILS(skim_reducer_reduce(reducer, 7, gradient, N, unknown, NULL), wrong, "not 9");
  CHECK_FAILS(skim_reducer_reduce(reducer, 7, NULL, N, SKIM_F32, NULL), wrong, "");
  CHECK_FAILS(skim_reducer_start(reducer, 7, gradient, N, SKIM_F32, NULL), wrong, "ticket is NULL");
  CHECK_FAILS(skim_reducer_wait(reducer, 12345, &report), wrong, "ticket");
  CHECK_FAILS(skim_reducer_residual(reducer, 7, gradient, 3), wrong, "has 100 entries, not 3");
  CHECK_FAILS(skim_reducer_save(reducer, NULL), wrong, "state is NULL");
  CHECK_FAILS(skim_reducer_load(reducer, NULL, 1, 1, NULL), wrong, "states is NULL");
  CHECK_FAILS(skim_communicator_over(NULL, &alone), wrong, "transport is NULL");
  skim_transport transport = {NULL, send_all, receive_all, 4, 4, 0};
  CHECK_FAILS(skim_communicator_over(&transport, &alone), wrong, "rank=4");
  transport.send = NULL;
  CHECK_FAILS(skim_communicator_over(&transport, &alone), wrong, "send or receive is NULL");

  /* Nothing has changed: the step goes on. start() has shown that no ticket is open. */
  CHECK(skim_reducer_start(reducer, 7, gradient, N, SKIM_F32, &ticket) == SKIM_OK);
  float residual[N];
  CHECK_FAILS(skim_reducer_residual(reducer, 7, residual, N), wrong, "a step or a ticket");
  CHECK(skim_reducer_wait(reducer, ticket, &report) == SKIM_OK && report.n == N);
  CHECK_FAILS(skim_reducer_residual(reducer, 7, residual, N), wrong, "a step or a ticket");
  CHECK(skim_reducer_rollback_step(reducer, 0.0) == SKIM_OK);
  CHECK(skim_reducer_residual(reducer, 7, residual, N) == SKIM_OK);
  skim_reducer_free(reducer);
  skim_communicator_free(alone);

  CHECK(skim_communicator_rank(NULL) == -1 && skim_communicator_size(NULL) == -1);
  skim_communicator_abort(NULL, 0);
  skim_communicator_free(NULL);
  skim_reducer_free(NULL);
  skim_state_free(NULL);
}

static void damaged_states_are_refused(void) {
  skim_communicator* alone = NULL;
  CHECK(skim_in_process_group(1, 60.0, &alone) == SKIM_OK);
  skim_reducer* reducer = new_reducer(alone, "density=0.1 dense_below=0");
  skim_state state;
  CHECK(skim_reducer_save(reducer, &state) == SKIM_OK);
  ((unsigned char*)state.data)[state.bytes / 2] ^= 1;
  CHECK_FAILS(skim_reducer_load(reducer, &state, 1, 1, NULL), SKIM_STATE_ERROR, "");
  ((unsigned char*)state.data)[state.bytes / 2] ^= 1;
  CHECK(skim_reducer_load(reducer, &state, 1, 1, NULL) == SKIM_OK);
  skim_state_free(&state);
  skim_reducer_free(reducer);
  skim_communicator_free(alone);
}

static void a_state_of_other_parameters(void) {
  skim_communicator* alone = NULL;
  CHECK(skim_in_process_group(1, 60.0, &alone) == SKIM_OK);
  skim_reducer *saved = NULL, *loaded = NULL;
  CHECK(skim_reducer_new(alone, "density=0.5 dense_below=0", &saved) == SKIM_OK);
  CHECK(skim_reducer_new(alone, "density=0.5 dense_below=0", &loaded) == SKIM_OK);
  const skim_parameter before[] = {{0, "old", 2}, {1, "both", 2}};
  const skim_parameter after[] = {{0, "both", 2}, {1, "new", 2}};
  CHECK(skim_reducer_set_layout(saved, before, 2) == SKIM_OK);
  CHECK(skim_reducer_set_layout(loaded, after, 2) == SKIM_OK);
  float old[] = {1.0F, 8.0F}, both[] = {2.0F, 16.0F};
  CHECK(skim_reducer_reduce(saved, 0, old, 2, SKIM_F32, NULL) == SKIM_OK);
  CHECK(skim_reducer_reduce(saved, 1, both, 2, SKIM_F32, NULL) == SKIM_OK);
  CHECK(skim_reducer_end_step(saved, 0.0, NULL) == SKIM_OK);
  skim_state state;
  CHECK(skim_reducer_save(saved, &state) == SKIM_OK);

  const char* differences = "unchanged";
  CHECK_FAILS(skim_reducer_load(loaded, &state, 1, 1, &differences), SKIM_STATE_ERROR,
              "load with strict=false");
  CHECK(strcmp(differences, "unchanged") == 0);
  CHECK(skim_reducer_load(loaded, &state, 1, 0, &differences) == SKIM_OK);
  CHECK(strstr(differences, "'old'") != NULL && strstr(differences, "'new'") != NULL);
  CHECK(strstr(differences, "both") == NULL);
  float residual[2];
  CHECK(skim_reducer_residual(loaded, 0, residual, 2) == SKIM_OK);
  CHECK(residual[0] == 2.0F && residual[1] == 0.0F); /* 16 was sent */
  CHECK(skim_reducer_residual(loaded, 1, residual, 2) == SKIM_OK);
  CHECK(residual[0] == 0.0F && residual[1] == 0.0F);

  CHECK(skim_reducer_load(saved, &state, 1, 0, &differences) == SKIM_OK);
  CHECK(strcmp(differences, "") == 0);
  skim_state_free(&state);
  skim_reducer_free(saved);
  skim_reducer_free(loaded);
  skim_communicator_free(alone);
}

/* Rank 1 never comes. */
static void a_step_with_a_failed_bucket_cannot_end(void) {
  skim_communicator* group[2] = {NULL, NULL};
  CHECK(skim_in_process_group(2, 0.1, group) == SKIM_OK);
  skim_reducer* reducer = new_reducer(group[0], "dense_below=0");
  float gradient[N] = {1.0F};
  int apply = 7;
  CHECK(skim_reducer_reduce(reducer, 7, gradient, N, SKIM_F32, NULL) == SKIM_COMM_ERROR);
  CHECK_FAILS(skim_reducer_end_step(reducer, 0.0, &apply), SKIM_INVALID_ARGUMENT, "rollback_step");
  CHECK(apply == 7);
  CHECK(skim_reducer_rollback_step(reducer, 0.0) == SKIM_OK);
  CHECK(skim_reducer_end_step(reducer, 0.0, &apply) == SKIM_OK && apply == 1);
  skim_reducer_free(reducer);
  skim_communicator_free(group[0]);
  skim_communicator_free(group[1]);
}

static void an_empty_bucket_needs_no_memory(void) {
  skim_communicator* alone = NULL;
  CHECK(skim_in_process_group(1, 60.0, &alone) == SKIM_OK);
  skim_reducer* reducer = NULL;
  CHECK(skim_reducer_new(alone, "density=0.5", &reducer) == SKIM_OK);
  const skim_parameter parameters[] = {{0, "empty", 0}, {1, "one", 1}};
  CHECK(skim_reducer_set_layout(reducer, parameters, 2) == SKIM_OK);
  CHECK(skim_reducer_reduce(reducer, 0, NULL, 0, SKIM_F32, NULL) == SKIM_OK);
  CHECK(skim_reducer_rollback_step(reducer, 0.0) == SKIM_OK);
  CHECK(skim_reducer_residual(reducer, 0, NULL, 0) == SKIM_OK);
  CHECK_FAILS(skim_reducer_residual(reducer, 1, NULL, 1), SKIM_INVALID_ARGUMENT,
              "residual is NULL");
  skim_reducer_free(reducer);
  skim_communicator_free(alone);
}

static void non_finite_gradients(void) {
  skim_communicator* alone = NULL;
  CHECK(skim_in_process_group(1, 60.0, &alone) == SKIM_OK);
  for (int raise = 0; raise < 2; ++raise) {
    skim_reducer* reducer =
        new_reducer(alone, raise ? "dense_below=0 non_finite=raise" : "dense_below=0");
    float gradient[N] = {1.0F, 1e38F * 10.0F};
    int apply = 1;
    CHECK(skim_reducer_reduce(reducer, 7, gradient, N, SKIM_F32, NULL) == SKIM_OK);
    const skim_status status = skim_reducer_end_step(reducer, 0.0, &apply);
    CHECK(status == (raise ? SKIM_NON_FINITE : SKIM_OK));
    CHECK(apply == (raise ? 1 : 0)); /* a function that failed sets nothing */
    skim_reducer_free(reducer);
  }
  skim_communicator_free(alone);
}

/* Rank 2 gives up; all others hear of it. */
static void reduce_or_give_up(struct rank* me) {
  skim_reducer* reducer = new_reducer(me->communicator, "exchange=allgather dense_below=0");
  float gradient[N] = {1.0F};
  if (me->rank == 2) {
    skim_communicator_abort(me->communicator, 2);
  } else {
    me->status = skim_reducer_reduce(reducer, 7, gradient, N, SKIM_F32, NULL);
    strncpy(me->error, skim_last_error(), sizeof me->error - 1); /* of this thread */
  }
  skim_reducer_free(reducer);
  skim_communicator_free(me->communicator);
}

static void a_failure_reaches_all_ranks(void (*make_group)(struct rank*)) {
  static struct rank ranks[RANKS];
  make_group(ranks);
  run_all(ranks, RANKS, reduce_or_give_up);
  for (int r = 0; r < RANKS; ++r) {
    if (r == 2) continue;
    CHECK(ranks[r].status == SKIM_COMM_ERROR);
    CHECK(strstr(ranks[r].error, "because of rank 2") != NULL);
  }
  if (make_group == over_sockets) close_sockets();
}

/* A stream that breaks is an error that names the peer and the number. */
static int broken(void* context, int from, void* data, size_t bytes) {
  (void)context, (void)from, (void)data, (void)bytes;
  return 42;
}
static int swallow(void* context, int to, const void* data, size_t bytes) {
  (void)context, (void)to, (void)data, (void)bytes;
  return 0;
}
static void a_broken_stream_is_named(void) {
  const skim_transport transport = {NULL, swallow, broken, 0, 2, 0};
  skim_communicator* communicator = NULL;
  float gradient[N] = {1.0F};
  CHECK(skim_communicator_over(&transport, &communicator) == SKIM_OK);
  skim_reducer* reducer = new_reducer(communicator, "dense_below=0");
  CHECK_FAILS(skim_reducer_reduce(reducer, 7, gradient, N, SKIM_F32, NULL), SKIM_COMM_ERROR,
              "no message from rank 1");
  CHECK(strstr(skim_last_error(), "receive returned 42") != NULL);
  skim_reducer_free(reducer);
  skim_communicator_free(communicator);
}

/* On the ranks that mpirun started. */
static int over_mpi(void) {
  skim_communicator* communicator = NULL;
  CHECK(skim_connect_mpi(60.0, &communicator) == SKIM_OK);
  const int rank = skim_communicator_rank(communicator);
  const int size = skim_communicator_size(communicator);
  skim_reducer* reducer = new_reducer(communicator, "density=1");
  float gradient[N];
  for (int i = 0; i < N; ++i) gradient[i] = (float)(size * (i + rank));
  CHECK(skim_reducer_reduce(reducer, 7, gradient, N, SKIM_F32, NULL) == SKIM_OK);
  for (int i = 0; i < N; ++i) CHECK(gradient[i] == (float)(size * i + size * (size - 1) / 2));
  CHECK(skim_reducer_end_step(reducer, 0.0, NULL) == SKIM_OK);
  skim_reducer_free(reducer);
  skim_communicator_free(communicator);
  printf("rank %d of %d: MPI holds\n", rank, size);
  return 0;
}

int main(int argc, char** argv) {
  if (argc == 2 && strcmp(argv[1], "mpi") == 0) return over_mpi();
  CHECK(skim_abi_version() == SKIM_ABI_VERSION);
  CHECK(strcmp(skim_version(), EXPECTED_VERSION) == 0);
  arguments_are_refused();
  if (!HAS_MPI) {
    skim_communicator* none = NULL;
    CHECK_FAILS(skim_connect_mpi(60.0, &none), SKIM_INVALID_ARGUMENT, "without MPI");
    CHECK(none == NULL);
  }
  damaged_states_are_refused();
  a_state_of_other_parameters();
  a_step_with_a_failed_bucket_cannot_end();
  an_empty_bucket_needs_no_memory();
  non_finite_gradients();
  static const char* const options[] = {
      "density=0.1 dense_below=0 exchange=allgather",
      "density=0.1 dense_below=0 exchange=gtopk",
      "density=0.1 dense_below=0 exchange=param-server server=sharded down_density=0.2",
  };
  for (size_t i = 0; i < sizeof options / sizeof options[0]; ++i) {
    laws_hold(in_process, options[i]);
    laws_hold(over_sockets, options[i]);
  }
  a_failure_reaches_all_ranks(in_process);
  a_failure_reaches_all_ranks(over_sockets);
  a_broken_stream_is_named();
  puts("the C interface holds");
  return 0;
}
