"""The values as an ordinary differential equation, dh/dt = -∂F/∂h, integrated by diffrax on an unchanged model.

Inference by gradient descent with rate γ is Euler's method with step γ for this flow. A solver with error control takes the
steps it needs and ends at the same equilibrium.
"""

import diffrax
import jax
import jax.numpy as jnp
import optax

import pcx
import pcx.nn as pxnn


class MLP(pcx.EnergyModule):
    def __init__(self) -> None:
        self.layers = [pxnn.Linear(4, 8), pxnn.Linear(8, 8), pxnn.Linear(8, 3)]
        self.vodes = [pcx.Vode((8,)), pcx.Vode((8,)), pcx.Vode((3,))]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, vode in zip(self.layers, self.vodes, strict=True):
            x = vode(jnp.tanh(layer(x)))
        return x


def flow(model: MLP, x: jax.Array, observed: dict[str, jax.Array], time: float) -> pcx.Nodes[jax.Array]:
    """The values after this time, from the forward pass, with the observed nodes fixed."""
    start = pcx.initialise(model, x, observed)
    free = start.only(name for name in start if name not in observed)

    def velocity(t: jax.Array, free: pcx.Nodes[jax.Array], _: None) -> pcx.Nodes[jax.Array]:
        slope = jax.grad(lambda free: pcx.free_energy(model, start | free, x).sum())(free)
        return jax.tree.map(jnp.negative, slope)

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(velocity),
        diffrax.Tsit5(),
        t0=0.0,
        t1=time,
        dt0=0.05,
        y0=free,
        stepsize_controller=diffrax.PIDController(rtol=1e-8, atol=1e-10),
        max_steps=100_000,
    )
    return start | jax.tree.map(lambda a: a[-1], solution.ys)


def main() -> float:
    """How far the flow and plain gradient descent end from each other."""
    pxnn.seed(0)
    model = MLP()
    x = jax.random.normal(jax.random.key(0), (5, 4))
    observed = {"vodes.2": jax.nn.one_hot(jnp.arange(5) % 3, 3)}
    by_flow = flow(model, x, observed, time=60.0)
    by_descent = pcx.infer(model, x, observed, optimiser=optax.sgd(0.1), steps=600).values
    difference = max(float(jnp.abs(by_flow[name] - by_descent[name]).max()) for name in by_flow)
    print(f"largest difference between the flow and 600 steps of gradient descent: {difference:.1e}")
    return difference


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main()
