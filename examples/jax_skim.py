"""JAX trains an MLP on two ranks that send 2 % of their gradients over TCP, by Skim's C interface.

pip install jax
SKIM_LIBRARY=~/skim/lib/libskim.so python examples/jax_skim.py

Each rank is a process. The parent starts both. On machines of your own, start one process each, and connect
the sockets by their addresses.
"""

import hashlib
import multiprocessing
import socket
import sys

import ctypes_skim

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.flatten_util import ravel_pytree
except ImportError:
    sys.exit("jax_skim.py needs jax: pip install jax")

RANKS, STEPS, BATCH, INPUTS, HIDDEN, CLASSES = 2, 150, 32, 64, 256, 10


def transport(peer):
    """The functions that Skim sends and receives with. With two ranks there is one peer."""

    def receive(_, memory):
        while memory:
            count = peer.recv_into(memory)
            if count == 0:
                raise ConnectionError("the peer has closed its socket")
            memory = memory[count:]

    return lambda _, memory: peer.sendall(memory), receive


def loss(parameters, x, labels):
    hidden = jax.nn.relu(x @ parameters["w1"] + parameters["b1"])
    scores = jax.nn.log_softmax(hidden @ parameters["w2"] + parameters["b2"])
    return -jnp.mean(scores[jnp.arange(len(labels)), labels])


def train(rank, peer, results):
    peer.settimeout(60)  # a rank that is lost ends the others, too
    skim = ctypes_skim.Skim()
    communicator = skim.communicator_over(*transport(peer), rank, RANKS)

    keys = jax.random.split(jax.random.key(0), 4)  # equal on all ranks
    teacher = jax.random.normal(keys[0], (INPUTS, CLASSES))
    parameters = {
        "w1": jax.random.normal(keys[1], (INPUTS, HIDDEN)) * INPUTS**-0.5, "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(keys[2], (HIDDEN, CLASSES)) * HIDDEN**-0.5, "b2": jnp.zeros(CLASSES),
    }  # fmt: skip
    flat, unravel = ravel_pytree(parameters)
    # ravel_pytree goes through the dictionary in the order of its keys.
    lengths = {name: parameters[name].size for name in sorted(parameters)}
    reducer = skim.reducer(communicator, "density=0.02 exchange=allgather momentum_correction=0.9", lengths)
    loss_and_gradient = jax.jit(lambda flat, x, labels: jax.value_and_grad(lambda p: loss(unravel(p), x, labels))(flat))

    losses, sent = [], 0
    for step in range(STEPS):
        x = jax.random.normal(jax.random.fold_in(keys[3], step * RANKS + rank), (BATCH, INPUTS))
        value, gradient = loss_and_gradient(flat, x, jnp.argmax(x @ teacher, axis=1))
        mean = np.array(gradient)  # a copy in host memory that may be written to
        sent += reducer.step(mean).sent_bytes
        flat -= 0.05 * jnp.asarray(mean)
        losses.append(float(value))
    reducer.free()
    skim.free(communicator)
    first, last = np.mean(losses[:10]), np.mean(losses[-10:])
    results.put((rank, first, last, sent, flat.size, hashlib.sha256(np.array(flat).tobytes()).hexdigest()))


def main():
    context = multiprocessing.get_context("spawn")  # jax does not survive a fork
    results = context.Queue()
    ranks = [
        context.Process(target=train, args=(rank, peer, results)) for rank, peer in enumerate(socket.socketpair())
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit("jax_skim.py: a rank has failed")
    (_, first, last, sent, n, digest), other = sorted(results.get() for _ in ranks)
    print(f"loss {first:.3f}, after {STEPS} steps {last:.3f}; sent {sent / (STEPS * 4 * n):.1%} of dense; the ranks",
          "agree" if digest == other[-1] else "differ")  # fmt: skip


if __name__ == "__main__":
    main()
