// Lists that come at once are put on the page over several frames, so that no frame is long.

export class Gradual {
  private limit = $state(0);

  constructor(
    private readonly total: () => number,
    private readonly perFrame = 6,
  ) {
    this.limit = perFrame;
    $effect(() => {
      if (this.limit >= this.total()) return;
      const frame = requestAnimationFrame(() => {
        this.limit = Math.min(this.limit + this.perFrame, this.total());
      });
      return () => cancelAnimationFrame(frame);
    });
  }

  /** How many entries may be on the page in this frame. */
  get count(): number {
    return this.limit;
  }
}
