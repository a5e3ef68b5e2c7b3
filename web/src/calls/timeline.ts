// A timeline entry's details as one line of text.

export function describe(detail: Record<string, unknown> | undefined): string {
  if (detail === undefined || detail === null) return '';
  return Object.entries(detail)
    .filter(([, value]) => value !== null && value !== undefined && value !== '' && !(Array.isArray(value) && value.length === 0))
    .map(([name, value]) => `${name.replaceAll('_', ' ')} ${valueText(value)}`)
    .join(', ');
}

function valueText(value: unknown): string {
  if (typeof value === 'number') return Number.isInteger(value) ? String(value) : value.toFixed(2);
  if (Array.isArray(value)) return value.map(valueText).join(' → ');
  if (typeof value === 'object' && value !== null) {
    const stage = value as Record<string, unknown>;
    const name = stage.name ?? stage.node_id ?? stage.endpoint;
    if (name !== undefined && stage.start_layer !== undefined) {
      return `${String(name)} [${String(stage.start_layer)}${stage.end_layer === undefined ? '' : `–${String(stage.end_layer)}`}]`;
    }
    return describe(stage);
  }
  return String(value);
}
