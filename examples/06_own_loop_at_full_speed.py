"""A training loop of your own that is as fast as `sj.fit`.

Many steps run as one call of one compiled program, over data that stays on the device.
What happens between these calls is up to you. Here the loop measures nDCG every second
epoch and stops as soon as it is high enough. The losses have the same bits as `sj.fit`'s.

Run: python examples/06_own_loop_at_full_speed.py
"""

import numpy as np

import sparsejax as sj

ENOUGH = 0.5  # of nDCG@20


def main(num_epochs: int = 10) -> list[float]:
    train, heldout = sj.datasets.msweb().train.split(0.8, seed=0)
    config = sj.NetworkConfig.autoencoder(hidden=(64,))
    model, optimizer = sj.build(config, train, sj.optimizers.adam(1e-3))

    # Put everything below under `with jax.set_mesh(sj.make_mesh(...)):` for more devices.
    examples = sj.training.place(train)
    epochs = sj.training.Epochs(examples, batch_size=512, num_epochs=num_epochs, seed=0)
    program = sj.training.Program(model, optimizer)

    losses = []
    for epoch in range(num_epochs):
        waiting = []
        for dispatch in epochs.dispatches(epoch):
            # Returns at once. Reading the losses here would wait for the steps.
            waiting.append((program.launch(dispatch), dispatch.examples))
        sums = [np.dot(np.asarray(each, np.float64), count) for each, count in waiting]
        losses.append(float(sum(sums)) / epochs.num_rows)
        print(f"epoch {epoch + 1}: loss {losses[-1]:.4f}")
        if epoch % 2 == 1:
            # Rows may not be up to date. With the optimizer they are read as if they were.
            measured = sj.evaluate(model, train, heldout, k=20, optimizer=optimizer)
            print(f"  ndcg@20 {measured['ndcg@20']:.4f}")
            if measured["ndcg@20"] > ENOUGH:
                break
    optimizer.flush(model)  # at the end: all rows up to date
    return losses


if __name__ == "__main__":
    main()
