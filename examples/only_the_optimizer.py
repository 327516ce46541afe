"""Only the optimizer: find the rotation that maps one cloud of points onto another, without a model.

python examples/only_the_optimizer.py
"""

import torch

import rotexp

POINTS, SIZE, STEPS = 256, 16, 200


def main() -> None:
    """Minimize ‖A R − B‖² over orthogonal R, and compare with the solution that is known (orthogonal Procrustes)."""
    torch.manual_seed(0)
    a = torch.randn(POINTS, SIZE, dtype=torch.float64)
    hidden = rotexp.random_orthogonal(SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    b = a @ hidden + 0.1 * torch.randn(POINTS, SIZE, dtype=torch.float64)
    start = torch.eye(SIZE, dtype=torch.float64)
    if torch.linalg.det(a.T @ b) < 0:
        start[0, 0] = -1  # steps keep the determinant's sign
    rotation = torch.nn.Parameter(start)

    optimizer = rotexp.CayleySGD([rotation], lr=0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _step in range(STEPS):
        optimizer.zero_grad()
        loss = (a @ rotation - b).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
    optimizer.project()

    u, _, vt = torch.linalg.svd(a.T @ b)
    best = (a @ (u @ vt) - b).square().mean().item()
    found = (a @ rotation - b).square().mean().item()
    print(f"found {found:.6f}, best {best:.6f}")
    assert found < best * (1 + 1e-4)


if __name__ == "__main__":
    main()
