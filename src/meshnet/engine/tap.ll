; Called by ggml's scheduler before (ask) and after (not ask) each tensor of a graph: takes one named tensor out
; and stops the graph there. A C callback that never touches Python's lock; tap.py holds its machine code.
;
; %tap: name (null: idle), buffer, its size in bytes, bytes seen, times seen,
;       then the addresses of ggml_get_name, strcmp, ggml_nbytes and ggml_backend_tensor_get
%tap = type { ptr, ptr, i64, i64, i64, ptr, ptr, ptr, ptr }

define zeroext i1 @tap(ptr %tensor, i1 zeroext %ask, ptr %u) {
entry:
  %hits_at = getelementptr %tap, ptr %u, i32 0, i32 4
  %name = load ptr, ptr %u
  %off = icmp eq ptr %name, null
  br i1 %off, label %idle, label %on
idle:                                   ; wants nothing, lets the graph run
  %go = xor i1 %ask, true
  ret i1 %go
on:
  %hits = load i64, ptr %hits_at
  %done = icmp ne i64 %hits, 0
  br i1 %done, label %stop, label %live
stop:                                   ; a later part of the graph, on another device: stop at its first tensor
  ret i1 %ask
live:
  br i1 %ask, label %asked, label %found
asked:
  %get_name_at = getelementptr %tap, ptr %u, i32 0, i32 5
  %get_name = load ptr, ptr %get_name_at
  %compare_at = getelementptr %tap, ptr %u, i32 0, i32 6
  %compare = load ptr, ptr %compare_at
  %its_name = call ptr %get_name(ptr %tensor)
  %differs = call i32 %compare(ptr %its_name, ptr %name)
  %same = icmp eq i32 %differs, 0
  ret i1 %same
found:
  %nbytes_at = getelementptr %tap, ptr %u, i32 0, i32 7
  %nbytes = load ptr, ptr %nbytes_at
  %bytes = call i64 %nbytes(ptr %tensor)
  %bytes_at = getelementptr %tap, ptr %u, i32 0, i32 3
  store i64 %bytes, ptr %bytes_at
  store i64 1, ptr %hits_at
  %room_at = getelementptr %tap, ptr %u, i32 0, i32 2
  %room = load i64, ptr %room_at
  %fits = icmp ule i64 %bytes, %room
  br i1 %fits, label %copy, label %end
copy:
  %buffer_at = getelementptr %tap, ptr %u, i32 0, i32 1
  %buffer = load ptr, ptr %buffer_at
  %get_at = getelementptr %tap, ptr %u, i32 0, i32 8
  %get = load ptr, ptr %get_at
  call void %get(ptr %tensor, ptr %buffer, i64 0, i64 %bytes)
  br label %end
end:
  ret i1 false
}
