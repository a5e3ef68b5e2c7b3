// Requests to the tracker. Every error carries what the server said: message, code and the parameter's name.

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string = '',
    readonly param: string | null = null,
  ) {
    super(message);
    this.name = 'ApiError';
  }
}

let onUnauthorised: () => void = () => {};

/** Called whenever the tracker says that the cookie is no longer good. */
export function whenUnauthorised(handler: () => void): void {
  onUnauthorised = handler;
}

export function reportStatus(status: number): void {
  if (status === 401) onUnauthorised();
}

/** The error in a response that is not ok, whatever its body looks like. */
export async function errorOf(response: Response): Promise<ApiError> {
  const text = await response.text().catch(() => '');
  try {
    const error = (JSON.parse(text) as { error?: Record<string, unknown> }).error;
    if (error && typeof error.message === 'string') {
      return new ApiError(
        error.message,
        response.status,
        typeof error.code === 'string' ? error.code : '',
        typeof error.param === 'string' ? error.param : null,
      );
    }
  } catch {
    // Not JSON: a proxy's page, or nothing at all. The status says it.
  }
  const said = text.length > 0 && text.length < 300 && !text.includes('<') ? `: ${text}` : '';
  return new ApiError(`The tracker answered ${response.status} ${response.statusText}${said}`, response.status);
}

export async function api<T>(
  method: 'GET' | 'POST' | 'PUT' | 'PATCH' | 'DELETE',
  path: string,
  body?: unknown,
  options: { signal?: AbortSignal; quiet401?: boolean } = {},
): Promise<T> {
  let response: Response;
  try {
    response = await fetch(path, {
      method,
      credentials: 'same-origin',
      cache: 'no-store',
      headers: body === undefined ? {} : { 'content-type': 'application/json' },
      body: body === undefined ? null : JSON.stringify(body),
      signal: options.signal ?? null,
    });
  } catch (cause) {
    if (options.signal?.aborted) throw cause;
    throw new ApiError('The tracker does not answer. Is it running?', 0, 'unreachable');
  }
  if (!response.ok) {
    if (!options.quiet401) reportStatus(response.status);
    throw await errorOf(response);
  }
  const text = await response.text();
  return (text === '' ? null : JSON.parse(text)) as T;
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
