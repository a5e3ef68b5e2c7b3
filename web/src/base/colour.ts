// Colours for what is drawn on a canvas: the page's own properties, as the browser resolves them now.

export function resolvedColour(value: string): string {
  const probe = document.createElement('span');
  probe.style.setProperty('color', value);
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}
