"""The kernels. A program walks down a run of rows of a few channels, and holds in registers what a row needs of others.

So each number is read once but for the rows at the ends of a run, and the weights' gradients are sums in registers.
Rows are tokens counted over the whole batch: row b * T + t. A row's position in its document is the number of rows
before it that it may see.
"""

import triton
import triton.language as tl


@triton.jit
def _start(seq_len, CHANNELS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The program's run, its first row (int64), that row's position in a dense batch, and the channels."""
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    run = (program // BLOCKS).to(tl.int64)
    row = run * ROWS
    channel = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    return run, row, (row % seq_len).to(tl.int32), channel


@triton.jit
def _parameters(weight, bias, channel, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """The weight of each lag, a tuple, and the bias, fp32."""
    weights = ()
    for lag in tl.static_range(TAPS):
        read = tl.load(weight + lag * CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
        weights = weights + (read.to(tl.float32),)
    if bias is not None:
        shift = tl.load(bias + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    else:
        shift = tl.zeros([BLOCK], tl.float32)
    return weights, shift


@triton.jit
def _rows(
    x, row, first, last, channel, ROW: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr
):
    """A tuple of COUNT rows, from `row` on in steps of STRIDE, zero outside first <= row < last."""
    place = x + row * ROW + channel
    rows = ()
    for i in tl.static_range(COUNT):
        there = (row + i * STRIDE >= first) & (row + i * STRIDE < last)
        rows = rows + (tl.load(place + i * STRIDE * ROW, mask=there & (channel < CHANNELS), other=0.0),)
    return rows


@triton.jit
def _float(rows, COUNT: tl.constexpr):
    wide = ()
    for i in tl.static_range(COUNT):
        wide = wide + (rows[i].to(tl.float32),)
    return wide


@triton.jit
def _positions(positions, row, token, num_rows, seq_len, COUNT: tl.constexpr):
    """A tuple of the positions of COUNT rows from `row` on, and the dense position of the one after them."""
    found = ()
    for i in tl.static_range(COUNT):
        if positions is not None:
            found = found + (tl.load(positions + row + i, mask=row + i < num_rows, other=0),)
        else:
            found = found + (token,)
            token = tl.where(token + 1 == seq_len, 0, token + 1)
    return found, token


@triton.jit
def _visible(newest, before, position, TAPS: tl.constexpr):
    """A row, and those before it: the lags 0 to TAPS - 1, zero outside its document."""
    seen = (newest,)
    for lag in tl.static_range(1, TAPS):
        seen = seen + (tl.where(position >= lag, before[lag - 1], 0.0),)
    return seen


@triton.jit
def _shifted(newest, before, TAPS: tl.constexpr):
    """The TAPS - 1 rows before the next."""
    window = ()
    if TAPS > 1:
        window = (newest,)
        for lag in tl.static_range(TAPS - 2):
            window = window + (before[lag],)
    return window


@triton.jit
def _weighted(seen, weights, shift, TAPS: tl.constexpr):
    z = shift
    for lag in tl.static_range(TAPS):
        z += weights[lag] * seen[lag]
    return z


@triton.jit(do_not_specialize=["num_rows", "seq_len"])
def forward_kernel(
    x,
    weight,
    bias,
    positions,
    y,
    num_rows,
    seq_len,
    X_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a run of ROWS rows and a block of channels; it reads STEP rows at once."""
    _, row, token, channel = _start(seq_len, CHANNELS, ROWS, BLOCK)
    weights, shift = _parameters(weight, bias, channel, CHANNELS, TAPS, BLOCK)
    before = _float(_rows(x, row - 1, 0, num_rows, channel, X_ROW, CHANNELS, TAPS - 1, -1), TAPS - 1)
    for _ in range(0, tl.minimum(ROWS, num_rows - row), STEP):
        read = _rows(x, row, 0, num_rows, channel, X_ROW, CHANNELS, STEP, 1)
        position, token = _positions(positions, row, token, num_rows, seq_len, STEP)
        for i in tl.static_range(STEP):
            newest = read[i].to(tl.float32)
            z = _weighted(_visible(newest, before, position[i], TAPS), weights, shift, TAPS)
            before = _shifted(newest, before, TAPS)
            if SILU:
                z *= tl.sigmoid(z)
            place = y + row * CHANNELS + channel + i * CHANNELS
            tl.store(place, z.to(y.dtype.element_ty), mask=(row + i < num_rows) & (channel < CHANNELS))
        row += STEP


@triton.jit(do_not_specialize=["num_rows", "seq_len"])
def backward_kernel(
    grad_y,
    x,
    weight,
    bias,
    positions,
    grad_x,
    partial,
    num_rows,
    seq_len,
    X_ROW: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a run of ROWS rows and a block of channels, and the rows after the run that see it.

    With z the convolution, dz = silu'(z) dy, a row t adds w_lag dz_t to the pending gradients of the rows t - lag that
    it sees, of which the last is then complete, and dz_t x_{t - lag} to the run's sums for the weights.
    """
    run, row, token, channel = _start(seq_len, CHANNELS, ROWS, BLOCK)
    weights, shift = _parameters(weight, bias, channel, CHANNELS, TAPS, BLOCK)
    before = _float(_rows(x, row - 1, 0, num_rows, channel, X_ROW, CHANNELS, TAPS - 1, -1), TAPS - 1)
    zero = tl.zeros([BLOCK], tl.float32)
    pending = ()
    for _ in tl.static_range(TAPS - 1):
        pending = pending + (zero,)
    sums = pending + (zero,)
    grad_shift = zero
    for step in range(0, tl.minimum(ROWS, num_rows - row) + TAPS - 1, STEP):
        read = _rows(x, row, 0, num_rows, channel, X_ROW, CHANNELS, STEP, 1)
        upstream = _rows(grad_y, row, 0, num_rows, channel, CHANNELS, CHANNELS, STEP, 1)
        position, token = _positions(positions, row, token, num_rows, seq_len, STEP)
        for i in tl.static_range(STEP):
            newest = read[i].to(tl.float32)
            seen = _visible(newest, before, position[i], TAPS)
            before = _shifted(newest, before, TAPS)
            grad = upstream[i].to(tl.float32)
            if SILU:
                z = _weighted(seen, weights, shift, TAPS)
                gate = tl.sigmoid(z)
                grad *= gate + z * gate * (1 - gate)
            own = tl.where(step < ROWS, grad, 0.0)
            grad_shift += own
            added = ()
            completed = ()
            for lag in tl.static_range(TAPS):
                added = added + (sums[lag] + own * seen[lag],)
                share = weights[lag] * grad
                if lag > 0:
                    share = pending[lag - 1] + tl.where(position[i] >= lag, share, 0.0)
                completed = completed + (share,)
            sums = added
            pending = _shifted(completed[0], completed[1:], TAPS)
            place = grad_x + row * CHANNELS + channel + (i - (TAPS - 1)) * CHANNELS
            done = step + i - (TAPS - 1)
            inside = (done >= 0) & (done < ROWS) & (row + i - (TAPS - 1) < num_rows)
            tl.store(place, completed[TAPS - 1].to(grad_x.dtype.element_ty), mask=inside & (channel < CHANNELS))
        row += STEP
    SUMS: tl.constexpr = TAPS + (bias is not None)
    place = partial + run * SUMS * CHANNELS + channel
    for lag in tl.static_range(TAPS):
        tl.store(place + lag * CHANNELS, sums[lag], mask=channel < CHANNELS)
    if bias is not None:
        tl.store(place + TAPS * CHANNELS, grad_shift, mask=channel < CHANNELS)
